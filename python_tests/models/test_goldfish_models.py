"""Goldfish loss on every grid and on pipelines against one process of plain PyTorch, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_ext import GridShape, full_gradients, full_state_dict, models, sync_gradients
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.nn import goldfish_labels
from axonn_ext.pipeline import MicroBatch, Pipeline, PipelineOptions
from axonn_ext.spec.goldfish import Goldfish
from axonn_ext.spec.stages import Stages
from goldfish_cases import labels_of
from grids import factorisations, grid_of
from model_cases import BATCH, CONFIGS, LENGTH

GOLDFISH = Goldfish(k=2, h=2)
MICRO_BATCHES = 2
GRIDS = {
    1: [GridShape()],
    2: [*factorisations(2), GridShape(pipe=2)],
    4: [*factorisations(4), *(GridShape(pipe=2, **{a: 2}) for a in ("x", "y", "z", "data"))],
    8: [GridShape(2, 2, 2), GridShape(2, 2, 1, 2), GridShape(1, 2, 2, 2), GridShape(2, 1, 2, 2),
        GridShape(pipe=2, x=2, z=2), GridShape(pipe=2, y=2, data=2)],
}  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    """Tokens [B, S + 1] with repeats, and the document number of each token."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(64, (BATCH, LENGTH + 1), generator=generator)
    tokens[2] = 0
    begins = torch.rand(tokens.shape, generator=generator) < 0.1
    return tokens, begins.cumsum(1)


def reference(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's cross-entropy of the rows that the rule in Python keeps, and all gradients."""
    tokens, documents = batch()
    labels = labels_of(tokens, GOLDFISH, documents)
    kept = labels != -100
    assert 0.1 < 1 - kept.double().mean() < 0.6, "the batch drops nothing, or all"
    model = PlainTransformer(config).double()
    model.load_state_dict(state)
    loss = F.cross_entropy(model(tokens[:, :-1])[kept], labels[kept])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return {"loss": loss.detach(), **grads}


def errors_on_grid(
    shape: GridShape, config: ModelConfig, parallel: ParallelConfig
) -> dict[str, float]:
    """Relative errors of the loss and of every gradient, with labels made by each row group."""
    grid = grid_of(shape)
    stages = Stages.balanced(config, shape.pipe, 1)
    model = models.build(config, grid, parallel, seed=2, dtype=torch.float64, stages=stages)
    want = reference(config, full_state_dict(model))
    own = {0: ("data", "z")}
    tokens, documents = (grid.shard(each, own) for each in batch())
    labels = goldfish_labels(tokens, GOLDFISH, documents=documents)
    if shape.pipe > 1:
        pairs = zip(*(t.chunk(MICRO_BATCHES) for t in (tokens[:, :-1], labels)), strict=True)
        with Pipeline(model, grid, PipelineOptions()) as pipeline:
            loss = pipeline.step([MicroBatch(ids, of) for ids, of in pairs])
            pipeline.sync_gradients()
    else:
        loss = model.loss(tokens[:, :-1], labels)
        loss.backward()
        sync_gradients(model)
    got = {"loss": loss.detach(), **full_gradients(model)}
    assert got.keys() == want.keys()
    # Without rotary positions, the gradient of the keys' bias is 0 except for rounding.
    scale = {name: want[name.replace("k_proj.bias", "q_proj.bias")] for name in want}
    return {n: ((got[n] - want[n]).norm() / scale[n].norm()).item() for n in want}


def failures(world_size: int, name: str, layout: str) -> list[str]:
    """Values that differ by more than 1e-11 from one process; in fp64, not due to rounding."""
    config, parallel, found = CONFIGS[name], ParallelConfig(layout=layout), []
    for shape in GRIDS[world_size]:
        errors = errors_on_grid(shape, config, parallel)
        found += [f"{shape} {n}: {e:.1e}" for n, e in errors.items() if not e < 1e-11]
    return found


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize(
    ("name", "world_size"),
    [("gpt2", 1), ("gpt2", 2), ("llama", 4),
     *(pytest.param(*pair, marks=pytest.mark.slow) for pair in
       (("llama", 1), ("llama", 2), ("gpt2", 4), ("gpt2", 8), ("llama", 8)))],
)  # fmt: skip
def test_loss_and_gradients_equal_one_process(pool, name, world_size, layout) -> None:
    for found in pool(world_size).run(failures, world_size, name, layout):
        assert not found, "\n".join(found)
