"""Weight gradients computed after backward, against those of an ordinary backward, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

from axonn_ext import Grid, GridShape, clip_grad_norm_, models, sync_gradients
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.pretrained import add_adapters
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import DeferredWeightGradients, Linear
from axonn_ext.nn.deferred import WeightGradients
from axonn_ext.overlap import Orchestrator
from grids import factorisations, grid_of
from model_cases import CONFIGS, GPT2, LLAMA, random_batch
from overlap_cases import ON, SHARDED

# Bits are equal except where the order of sums differs: of the two gradients of a tied table; of dx
# in "chunked", as its sum over ranks does not overlap the product of dW; and over data in an
# orchestrator's buckets, which are filled as gradients complete. There, in fp64, anything above
# this limit is an error of the algorithm.
LIMIT = 1e-12


@dataclasses.dataclass(frozen=True)
class Case:
    config: ModelConfig = LLAMA
    parallel: ParallelConfig = SHARDED
    orchestrated: bool = False
    adapted: bool = False

    @property
    def limit(self) -> float:
        tied = self.config.tie_embeddings and not self.adapted
        reordered = tied or self.orchestrated or self.parallel.algorithm == "chunked"
        return LIMIT if reordered else 0.0


KEPT = ParallelConfig(save_gathered=True, reshard_after_forward=False)
CASES = {
    "sharded": Case(),
    "tied": Case(GPT2),
    "replicated": Case(GPT2, ParallelConfig(layout="replicated")),
    "heads_over_y": Case(parallel=ParallelConfig(heads_over_y=True)),
    "kept": Case(parallel=KEPT),
    "recompute": Case(GPT2, ParallelConfig(recompute="full")),
    "recompute attention": Case(parallel=ParallelConfig(recompute="attention")),
    "recompute every:2": Case(GPT2, ParallelConfig(recompute="every:2")),
    "recompute kept": Case(parallel=dataclasses.replace(KEPT, recompute="full")),
    "chunked": Case(GPT2, ParallelConfig(algorithm="chunked")),
    "adapted": Case(adapted=True),
    "orchestrated": Case(orchestrated=True),
    "orchestrated tied": Case(CONFIGS["llama-tied"], orchestrated=True),
    "orchestrated recompute": Case(GPT2, ParallelConfig(recompute="full"), orchestrated=True),
}
NUM_MICRO_BATCHES = 2


def micro_batches(model: Transformer) -> Iterator[Callable[[], Tensor]]:
    """For each micro-batch, a function that computes its loss."""
    ids, labels = (model.grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    num_labels = float((random_batch()[1] != -100).sum())
    for part in zip(ids.chunk(NUM_MICRO_BATCHES), labels.chunk(NUM_MICRO_BATCHES), strict=True):
        yield lambda part=part: model.loss(*part, num_labels)


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained weights that only Linears use, and the biases of these Linears."""
    others = {
        id(p)
        for module in model.modules()
        if not isinstance(module, Linear)
        for p in module.parameters(recurse=False)
    }
    return {
        f"{name}.{own}": p
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.weight.requires_grad
        for own, p in module.named_parameters(recurse=False)
        if id(p) not in others
    }


@contextmanager
def all_but_last(orchestrator: Orchestrator | None, index: int) -> Iterator[None]:
    with ExitStack() as stack:
        if orchestrator is not None and index < NUM_MICRO_BATCHES - 1:
            stack.enter_context(orchestrator.no_sync())
        yield


def ordinary(model: Transformer, orchestrator: Orchestrator | None) -> None:
    losses = [loss() for loss in micro_batches(model)]
    for index, loss in enumerate(losses):
        with all_but_last(orchestrator, index):
            loss.backward()


def deferring(model: Transformer, orchestrator: Orchestrator | None) -> None:
    deferred = DeferredWeightGradients(model)
    passes: list[tuple[Tensor, WeightGradients]] = []
    for loss in micro_batches(model):
        with deferred.collecting() as later:
            passes.append((loss(), later))
    assert [later.num_bytes for _, later in passes] == [0] * NUM_MICRO_BATCHES
    for loss, _ in passes:
        with all_but_last(orchestrator, -1):
            loss.backward()
    weights = linear_weights(model)
    early = [name for name, p in weights.items() if p.grad is not None]
    assert not early, early
    for index, (_, later) in enumerate(passes):
        assert (later.num_bytes > 0) == bool(weights)
        with all_but_last(orchestrator, index):
            later.run()
        assert later.num_bytes == 0
    deferred.close()
    assert all(m.deferral is None for m in model.modules() if isinstance(m, Linear))


def train(
    grid: Grid, case: Case, backward: Callable[[Transformer, Orchestrator | None], None]
) -> dict[str, Tensor]:
    """The gradients of a step; with an orchestrator also of the next, which prefetches."""
    model = models.build(case.config, grid, case.parallel, seed=2, dtype=torch.float64)
    if case.adapted:
        add_adapters(model, rank=3, alpha=7.0)
        model.blocks[0].mlp.down.weight.requires_grad_()
        for name, p in model.named_parameters():
            if name.endswith("_b"):  # otherwise A has no gradient
                nn.init.constant_(p, 0.1)
    orchestrator = Orchestrator(model, ON) if case.orchestrated else None
    record: dict[str, Tensor] = {}
    for step in range(1 + case.orchestrated):
        backward(model, orchestrator)
        sync_gradients(model) if orchestrator is None else orchestrator.sync_gradients()
        record |= {f"{step} norm": clip_grad_norm_(model, 0.5)}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    record[f"{step} {name}"] = p.grad.clone()
                    p -= 0.1 * p.grad
                    p.grad = None
    if orchestrator is not None:
        orchestrator.close()
    return record


def differences(shapes: list[GridShape], name: str) -> list[str]:
    found = []
    for shape in shapes:
        grid, case = grid_of(shape), CASES[name]
        got, want = train(grid, case, deferring), train(grid, case, ordinary)
        assert got.keys() == want.keys()
        scales = {n: want[n.replace("k_proj.bias", "q_proj.bias")].norm() for n in want}
        for n in want:
            error = ((got[n] - want[n]).norm() / scales[n]).item()
            if not error <= case.limit:
                found.append(f"{shape} {n}: {error:.1e}")
    return found


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("tied", 1),
        ("recompute", 1),
        *((name, 2) for name in CASES),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_gradients_are_those_of_backward(pool, name, world_size):
    shapes = factorisations(world_size)
    for found in pool(world_size).run(differences, shapes, name):
        assert not found, "\n".join(found)


SAMPLE = {
    "sharded": GridShape(x=2, z=2),
    "kept": GridShape(y=2, z=2),
    "recompute": GridShape(x=2, y=2),
    "orchestrated": GridShape(z=2, data=2),
    "orchestrated tied": GridShape(x=2, z=2),
}


@pytest.mark.parametrize("name", list(SAMPLE))
def test_4_ranks(pool, name):
    for found in pool(4).run(differences, [SAMPLE[name]], name):
        assert not found, "\n".join(found)
