"""Policies of recomputation: their blocks, the same bits as without, and the recomputed ops."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor

from axonn_ext import Grid, GridShape, models, sync_gradients, trace_communication
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.nn import Places
from axonn_ext.overlap import Orchestrator
from axonn_ext.pipeline import Pipeline
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.recompute import Recomputation, recomputation_of
from grids import every_grid, grid_of
from model_cases import BATCH, CONFIGS, LLAMA, random_batch, sampled
from overlap_cases import ON
from pipeline_cases import OPTIONS, config_of, make, own_batches

pytestmark = pytest.mark.long

POLICIES = ("attention", "every:2", "every:2/3", "full")

# --- What policies name --------------------------------------------------------------------------


def test_policies_and_the_blocks_that_they_name() -> None:
    named = {
        "none": [], "attention": [], "full": [0, 1, 2, 3, 4, 5, 6], "every:2": [0, 2, 4, 6],
        "every:3": [0, 3, 6], "every:2/3": [0, 1, 3, 4, 6], "every:100": [0],
    }  # fmt: skip
    for policy, blocks in named.items():
        found = recomputation_of(policy)
        assert [n for n in range(7) if found.has_block(n)] == blocks, policy
        assert found.attention == (policy == "attention")


def test_numbers_of_blocks_are_those_that_are_named() -> None:
    for of in range(1, 6):
        for blocks in range(of + 1):
            policy = Recomputation(blocks, of)
            named = [policy.has_block(n) for n in range(40)]
            assert policy.share_of_blocks == sum(named[: 5 * of]) / (5 * of)
            for count in range(12):
                assert policy.num_blocks(count) == sum(named[:count])
                windows = [sum(named[n : n + count]) for n in range(of)]
                assert policy.fewest_blocks(count) == min(windows)


@pytest.mark.parametrize(
    "value",
    [True, False, None, 2, "", "on", "selective", "Full", "every", "every:", "every:0", "every:1",
     "every:2/2", "every:3/2", "every:0/2", "every:-2", "every:2.0", "every: 2", "every:02",
     "every:\u0662", "every:2\n", "every:1000000000000"],
)  # fmt: skip
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"recompute must be none, attention, every:K .* or full"):
        ParallelConfig(recompute=value)  # type: ignore[arg-type]


# --- The same bits -------------------------------------------------------------------------------


def gradients(
    grid: Grid, config: ModelConfig, parallel: ParallelConfig,
    overlap: Overlap | None = None, places: Places | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Loss and gradients; with overlap, of the second step, which knows the order of weights."""
    model = models.build(config, grid, parallel, seed=2)
    orchestrator = None if overlap is None else Orchestrator(model, overlap)
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    for _ in range(1 if orchestrator is None else 2):
        model.zero_grad()
        loss = model.loss(ids, labels, places=places)
        loss.backward()
        sync_gradients(model) if orchestrator is None else orchestrator.sync_gradients()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    if orchestrator is not None:
        orchestrator.close()
    return found | {"loss": loss.detach()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def differing_on_grids(name: str, parallel: ParallelConfig, overlap: Overlap | None) -> list[str]:
    """Results that differ in any bit from those without recomputation."""
    config, found = dataclasses.replace(CONFIGS[name], num_layers=3), []
    for grid in every_grid():
        if models.check(config, parallel, grid.shape, batch_size=BATCH):
            continue
        want = gradients(grid, config, parallel, overlap)
        for policy in POLICIES:
            again = dataclasses.replace(parallel, recompute=policy)
            got = gradients(grid, config, again, overlap)
            found += [f"{grid.shape} {policy} {what}" for what in differing(got, want)]
    return found


WAYS = {
    "sharded": ParallelConfig(),
    "replicated": ParallelConfig(layout="replicated"),
    "heads_over_y": ParallelConfig(heads_over_y=True),
    "kept": ParallelConfig(save_gathered=True, reshard_after_forward=False),
}


@pytest.mark.parametrize(("name", "world_size"), sampled(CONFIGS, (1, 2)))
def test_the_same_bits_for_every_family(pool, name, world_size) -> None:
    for found in pool(world_size).run(differing_on_grids, name, WAYS["sharded"], None):
        assert not found


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen3-wide", marks=pytest.mark.slow)])
def test_the_same_bits_on_grids_of_4(pool, name, way) -> None:
    for found in pool(4).run(differing_on_grids, name, WAYS[way], None):
        assert not found


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_same_bits_with_overlap(pool, name) -> None:
    for found in pool(4).run(differing_on_grids, name, WAYS["sharded"], ON):
        assert not found


def differing_where_heads_are_shared() -> list[str]:
    config = dataclasses.replace(CONFIGS["qwen3-wide"], num_kv_heads=2)
    grid = grid_of(GridShape(x=4))
    assert config.num_heads > grid.size("x") > config.kv_heads
    want = gradients(grid, config, ParallelConfig())
    return [
        f"{policy} {what}"
        for policy in POLICIES
        for what in differing(gradients(grid, config, ParallelConfig(recompute=policy)), want)
    ]


def test_the_same_bits_where_ranks_share_a_key_value_head(pool) -> None:
    for found in pool(4).run(differing_where_heads_are_shared):
        assert not found


def differing_with_documents() -> list[str]:
    found = []
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3]] * BATCH)
    for grid in every_grid():
        places = Places.packed(grid.shard(documents, {0: ("data", "z")}))
        want = gradients(grid, LLAMA, ParallelConfig(), places=places)
        for policy in POLICIES:
            got = gradients(grid, LLAMA, ParallelConfig(recompute=policy), places=places)
            found += [f"{grid.shape} {policy} {what}" for what in differing(got, want)]
    return found


def test_the_same_bits_with_several_documents_in_a_sequence(pool) -> None:
    for found in pool(2).run(differing_with_documents):
        assert not found


def of_pipeline(shape: GridShape, options: str, recompute: str) -> dict[str, Tensor]:
    parallel = ParallelConfig(recompute=recompute)
    model = make(config_of("llama-tied", 6), shape, OPTIONS[options], parallel)
    with Pipeline(model, model.grid, OPTIONS[options]) as pipeline:
        loss = pipeline.step(own_batches(model.grid))
        pipeline.sync_gradients()
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": loss}


def differing_in_pipelines(shape: GridShape, options: str) -> list[str]:
    want = of_pipeline(shape, options, "none")
    return [
        f"{policy} {what}"
        for policy in POLICIES
        for what in differing(of_pipeline(shape, options, policy), want)
    ]


@pytest.mark.parametrize("options", ["1f1b", "zero_bubble", "interleaved"])
def test_the_same_bits_in_pipelines(pool, options) -> None:
    """These schedules have a fixed order, so micro-batches' gradients are added in one order."""
    for shape in (GridShape(pipe=2, x=2), GridShape(pipe=2, z=2)):
        for found in pool(4).run(differing_in_pipelines, shape, options):
            assert not found


# --- What runs again -----------------------------------------------------------------------------


def collectives(grid: Grid, config: ModelConfig, recompute: str) -> Counter[str]:
    with trace_communication() as trace:
        gradients(grid, config, ParallelConfig(recompute=recompute))
    return Counter(record.op for record in trace.records)


def more_collectives(config: ModelConfig) -> dict[str, Counter[str]]:
    """For each policy, the additional collectives of a step."""
    grid = grid_of(GridShape(2, 2))
    none = collectives(grid, config, "none")
    return {policy: collectives(grid, config, policy) - none for policy in POLICIES}


def test_collectives_of_recomputed_blocks_run_again_and_no_others(pool) -> None:
    config = dataclasses.replace(LLAMA, num_layers=5)
    for more in pool(4).run(more_collectives, config):
        blocks = {"attention": 0, "every:2": 3, "every:2/3": 4, "full": 5}
        for policy, count in blocks.items():
            # Per block: four Linears, each with a gather and a scatter, and two norms.
            want = {"axonn::linear_forward": 8 * count, "axonn::all_reduce": 2 * count}
            assert more[policy] == Counter({op: n for op, n in want.items() if n}), policy


def attended(recompute: str) -> list[int]:
    """The numbers of attention computations: in forward, in forward and backward, in inference."""
    model = models.build(LLAMA, grid_of(GridShape()), ParallelConfig(recompute=recompute), seed=2)
    counts, count = [], 0
    rotate = model.rotary.register_forward_hook(lambda *_: counts.append(1))
    ids, labels = random_batch()
    loss = model.loss(ids, labels)
    count = len(counts)
    loss.backward()
    after = len(counts)
    with torch.no_grad():
        model.loss(ids, labels)
    rotate.remove()
    return [count, after, len(counts) - after]


@pytest.mark.parametrize(
    ("recompute", "again"), [("none", 0), ("attention", 2), ("every:2", 1), ("full", 2)]
)
def test_attention_is_computed_again_in_backward_and_only_there(pool, recompute, again) -> None:
    assert LLAMA.num_layers == 2
    for found in pool(1).run(attended, recompute):
        assert found == [2, 2 + again, 2]


def models_of_generation() -> list[tuple[str, bool]]:
    grid, found = grid_of(GridShape()), []
    for policy in ("none", *POLICIES):
        parallel = ParallelConfig(layout="replicated", recompute=policy)
        model = models.build(LLAMA, grid, parallel, seed=2)
        other = model.replicated()
        attentions = [block.attention.recompute for block in other.blocks]
        found.append((other.parallel.recompute, any(attentions)))
    return found


def test_generation_recomputes_nothing(pool) -> None:
    assert pool(1).run(models_of_generation)[0] == [("none", False)] * 5
