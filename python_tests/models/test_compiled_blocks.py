"""Compiled blocks compute what eager ones do, in one graph, which blocks and steps share."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch

from axonn_ext import GridShape, add_adapters, models, sync_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.nn import DeferredWeightGradients, Places
from axonn_ext.overlap import Orchestrator, Overlap
from grids import grid_of, relative_error
from model_cases import CONFIGS, LLAMA, random_batch

pytestmark = pytest.mark.long

STEPS = 3
LIMIT = 1e-12  # fp64 sums of at most 64 terms, which generated code may add in another order
TRAINING, EVALUATION = 1, 1  # graphs of each kind of block
OVERLAP = Overlap(prefetch=4, deferred=2)


class Case(NamedTuple):
    """graphs: number that the model needs."""

    config: models.ModelConfig
    shape: GridShape
    parallel: ParallelConfig = ParallelConfig()
    overlap: Overlap | None = None
    packed: bool = False
    lora: bool = False
    graphs: int = TRAINING + EVALUATION


class Run(NamedTuple):
    """values: the losses and gradients of all steps. graphs: number compiled after each step.

    sent: collectives and bytes of each axis of the orchestrator.
    """

    values: dict[str, torch.Tensor]
    graphs: list[int]
    sent: dict[str, tuple[int, int]]


def train(case: Case, *, compiles: bool) -> Run:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    grid = grid_of(case.shape)
    model = models.build(case.config, grid, case.parallel, seed=2, dtype=torch.float64)
    if case.lora:
        add_adapters(model, rank=3, alpha=7.0, targets=["all-linear"], seed=4)
    orchestrator = None if case.overlap is None else Orchestrator(model, case.overlap)
    if compiles:
        model.compile_blocks()
    run = Run({}, [], {})
    for step in range(STEPS):
        ids, labels = (grid.shard(t.roll(step, 0), {0: ("data", "z")}) for t in random_batch())
        places = Places.packed(ids // 20) if case.packed else None
        loss = model.loss(ids, labels, 40.0, places)
        loss.backward()
        sync_gradients(model) if orchestrator is None else orchestrator.sync_gradients()
        run.values[f"loss {step}"] = loss.detach()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    run.values[f"{name}.grad {step}"] = p.grad
                    p -= 0.1 * p.grad
                    p.grad = None
            run.values[f"evaluation {step}"] = model.loss(ids, labels, 40.0, places)
        run.graphs.append(counters["stats"]["unique_graphs"])
    if orchestrator is not None:
        totals = orchestrator.totals()
        run.sent.update({axis: (t.num_tasks, t.bytes) for axis, t in totals.items()})
        orchestrator.close()
    return run


def compare(case: Case) -> tuple[float, list[int], bool]:
    """The largest error, the graphs after each step, and whether the lanes carried the same."""
    eager, compiled = (train(case, compiles=compiles) for compiles in (False, True))
    assert eager.values.keys() == compiled.values.keys() and not eager.graphs[-1]
    errors = {n: relative_error(compiled.values[n], want) for n, want in eager.values.items()}
    return max(errors.values()), compiled.graphs, compiled.sent == eager.sent


XZ, YD = GridShape(x=2, z=2), GridShape(y=2, data=2)
CASES = {
    "gpt2": Case(CONFIGS["gpt2"], XZ),
    "llama with overlap": Case(CONFIGS["llama"], XZ, overlap=OVERLAP),
}
# The first block's input needs no gradient if only adapters train.
WITH_LORA = 2 * TRAINING + EVALUATION
SLOW_CASES = {
    "gpt2 with overlap": Case(CONFIGS["gpt2"], XZ, overlap=OVERLAP),
    "llama": Case(CONFIGS["llama"], XZ),
    "attention recomputed": Case(CONFIGS["gpt2"], YD, ParallelConfig(recompute="attention")),
    "replicated": Case(
        CONFIGS["llama"], YD, ParallelConfig(layout="replicated"), packed=True, overlap=OVERLAP
    ),
    "heads over y": Case(
        CONFIGS["llama"], GridShape(x=2, y=2), ParallelConfig(heads_over_y=True), packed=True
    ),
    "all recomputed": Case(
        CONFIGS["llama"], GridShape(y=2, z=2), ParallelConfig(recompute="full"), overlap=OVERLAP
    ),
    "saved": Case(CONFIGS["qwen3"], XZ, ParallelConfig(recompute="every:2", save_gathered=True)),
    "shared heads": Case(dataclasses.replace(LLAMA, num_kv_heads=2), GridShape(x=4)),
    "lora": Case(CONFIGS["llama"], XZ, lora=True, graphs=WITH_LORA),
    "lora with overlap": Case(CONFIGS["llama"], XZ, lora=True, overlap=OVERLAP, graphs=WITH_LORA),
    "two kinds of blocks": Case(CONFIGS["gemma2"], XZ, graphs=2 * (TRAINING + EVALUATION)),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW_CASES.items()),
    ],
)
def test_blocks_share_a_graph_with_eager_results(case: Case, pool) -> None:
    for error, graphs, same_collectives in pool(4).run(compare, case):
        assert error <= LIMIT
        assert graphs == [case.graphs] * STEPS
        assert same_collectives


def graphs_of_batches(sizes: list[int]) -> list[int]:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = models.build(CONFIGS["gpt2"], grid_of(GridShape()), seed=2)
    model.compile_blocks()
    graphs = []
    for size in sizes:
        ids, labels = (t[:size] for t in random_batch())
        with torch.no_grad():
            model.loss(ids, labels)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_another_batch_size_compiles_once(pool) -> None:
    assert pool(1).run(graphs_of_batches, [8, 5, 8, 5, 5]) == [[1, 2, 2, 2, 2]]


def replicated_graphs() -> int:
    from torch._dynamo.utils import counters

    parallel = ParallelConfig(layout="replicated")
    model = models.build(CONFIGS["gpt2"], grid_of(GridShape()), parallel, seed=2)
    assert model.replicated() is model
    model.compile_blocks()
    counters.clear()
    ids, labels = random_batch()
    eager = model.replicated()
    assert eager.table.weight is model.table.weight
    eager.loss(ids, labels)
    return counters["stats"]["unique_graphs"]


def test_the_replicated_model_is_not_compiled(pool) -> None:
    assert pool(1).run(replicated_graphs) == [0]


def refused() -> str:
    model = models.build(CONFIGS["gpt2"], grid_of(GridShape()), seed=2)
    model.compile_blocks()
    with DeferredWeightGradients(model).collecting():
        try:
            model.loss(*random_batch())
        except ValueError as error:
            return str(error)
    return ""


def test_deferred_weight_gradients_are_refused(pool) -> None:
    assert pool(1).run(refused) == [
        "compile_blocks: compiled blocks cannot defer weight gradients: close the "
        "DeferredWeightGradients, or do not compile the blocks"
    ]
