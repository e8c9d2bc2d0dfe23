"""The record of whole training steps equals closed formulas, on real and on fake ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from axonn_ext import (
    CommunicationRecord,
    Grid,
    GridShape,
    clip_grad_norm_,
    models,
    sync_gradients,
    trace_communication,
)
from axonn_ext.models import ModelConfig, ParallelConfig
from fake_ranks import fake_ranks
from grids import grid_of

pytestmark = pytest.mark.long

GPT2 = ModelConfig(
    family="gpt2", vocab_size=64, hidden_size=32, num_layers=2, num_heads=8, sequence_length=8
)
LLAMA = dataclasses.replace(
    GPT2, family="llama", num_kv_heads=4, intermediate_size=48, tie_embeddings=False
)
PARALLEL = {
    "sharded": ParallelConfig(),
    "replicated": ParallelConfig(layout="replicated"),
    "heads_over_y": ParallelConfig(heads_over_y=True),
    "kept": ParallelConfig(save_gathered=True, reshard_after_forward=False),
}
BATCH = 16
GRIDS = {
    1: [GridShape()],
    2: [GridShape(x=2), GridShape(y=2), GridShape(z=2), GridShape(data=2)],
    4: [GridShape(2, 2), GridShape(2, 1, 2), GridShape(1, 2, 1, 2), GridShape(1, 1, 2, 2),
        GridShape(x=4), GridShape(y=4)],
}  # fmt: skip


def step(config: ModelConfig, parallel: ParallelConfig, grid: Grid, batch: int) -> None:
    model = models.build(config, grid, parallel)
    ids = torch.zeros(batch, config.sequence_length, dtype=torch.long)
    own = grid.shard(ids, {0: ("data", "z")})
    model.loss(own, own).backward()
    sync_gradients(model)
    clip_grad_norm_(model, 1.0)


def trace_step(*arguments: object, fake: bool = False) -> list[CommunicationRecord]:
    with FakeTensorMode() if fake else nullcontext(), trace_communication() as trace:
        step(*arguments)
    return trace.records


# --- The formulas --------------------------------------------------------------------------------


def linears(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(role, out-features, in-features) of every Linear except lm_head."""
    h, block = config.hidden_size, []
    block += [("expand", config.qkv_size, h), ("contract", h, h)]
    block += [("expand", config.up_size, h), ("contract", h, config.mlp_size)]
    return block * config.num_layers


def predicted_bytes(
    config: ModelConfig, parallel: ParallelConfig, shape: GridShape, batch: int
) -> dict[str, Fraction]:
    """Bytes per rank and axis of one fp32 step, from the volumes of the 3D algorithm.

    A rank sends (G - 1) / G of the elements in `full`, where an all-reduce counts twice. Only
    single numbers are rounded: the loss, the number of labels and the norm.
    """
    g, h, v = shape.as_dict(), config.hidden_size, config.vocab_size
    sharded, llama = parallel.layout == "sharded", config.family == "llama"
    m = batch * config.sequence_length // (g["data"] * g["z"])
    m_x, m_y = (m // g["x"], m // g["y"]) if sharded else (m, m)
    regather_x = sharded and not parallel.save_gathered
    full: Counter[str] = Counter()

    def weight(n: int, k: int, gathers: int) -> None:
        block = n * k // (g["x"] * g["y"])
        full["z"] += (gathers + 1) * block
        full["data"] += 2 * block // g["z"]

    def small_parameter(elements: int, axes: tuple[str, ...]) -> None:
        for axis in axes:
            full[axis] += 2 * elements

    gathers = 1 + parallel.reshard_after_forward
    for role, n, k in [*linears(config), ("lm_head", v, h)]:
        r, s = ("y", "x") if role == "contract" else ("x", "y")
        full[r] += (2 + regather_x) * m * k // g[s]
        full[s] += 2 * m * n // g[r]
        # A tied table is gathered once per step, and the sum of its gradients is reduced once.
        if role != "lm_head" or not config.tie_embeddings:
            weight(n, k, gathers)
        if role != "lm_head" and not llama:  # a bias
            small_parameter(n // g[r], ("z", "data"))
    weight(v, h, 1)
    full["x"] += 2 * m * h // g["y"]  # the embedding's rows, in forward and backward
    row_axes = ("x", "z", "data") if sharded else ("z", "data")
    if not llama:
        small_parameter(config.sequence_length * h // g["y"], row_axes)  # positions
    num_norms = 2 * config.num_layers + 1
    small_parameter(num_norms * (1 if llama else 2) * h // g["y"], row_axes)
    # The statistics of each row, in both passes: RMSNorm all-reduces one number; LayerNorm gathers
    # two from each rank in forward, and all-reduces two in backward.
    full["y"] += num_norms * m_x * (2 * 2 if llama else 2 * g["y"] + 2 * 2)
    full["x"] += 3 * 2 * m_y  # for the loss
    sent = {axis: Fraction((g[axis] - 1) * n * 4, g[axis]) for axis, n in full.items()}
    for axis in ("y", "z", "data") if sharded else ("z", "data"):
        sent[axis] += 2 * single_number_bytes(g[axis], 4)  # loss, number of labels
    for axis in "xyz":
        sent[axis] += single_number_bytes(g[axis], 8)  # norm
    return {axis: n for axis, n in sent.items() if n}


def single_number_bytes(group_size: int, itemsize: int) -> int:
    """The bytes for 2 (G - 1) / G of one element, rounded up to whole elements."""
    return {1: 0, 2: 1}.get(group_size, 2) * itemsize


def bytes_by_axis(records: list[CommunicationRecord]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for record in records:
        total[record.axis] += record.bytes_per_rank
    return dict(total)


def check_steps(world_size: int, parallel: str) -> None:
    for shape in GRIDS[world_size]:
        for config in (GPT2, LLAMA):
            options = PARALLEL[parallel]
            assert not models.check(config, options, shape, batch_size=BATCH)
            records = trace_step(config, options, grid_of(shape), BATCH)
            want = predicted_bytes(config, options, shape, BATCH)
            assert bytes_by_axis(records) == want, (shape, config)
            fake = trace_step(config, options, grid_of(shape), BATCH, fake=True)
            assert fake == records, (shape, config)


@pytest.mark.parametrize("parallel", list(PARALLEL))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_move_what_the_formulas_say_on_real_and_fake_tensors(pool, world_size, parallel):
    pool(world_size).run(check_steps, world_size, parallel)


# --- Recomputation -------------------------------------------------------------------------------


def count_recomputed(config: ModelConfig) -> tuple[Counter[str], Counter[str]]:
    grid, counts = grid_of(GridShape(2, 2)), []
    for recompute in ("none", "full"):
        records = trace_step(config, ParallelConfig(recompute=recompute), grid, BATCH)
        counts.append(Counter(record.op for record in records))
    return counts[0], counts[1]


def test_recomputed_collectives_are_recorded_again(pool):
    for plain, recomputed in pool(4).run(count_recomputed, LLAMA):
        more = recomputed - plain
        # Per block: four Linears, each with a gather and a scatter, and the statistics of two
        # norms, with one all-reduce each. Backward does not run twice.
        blocks = LLAMA.num_layers
        assert more == {"axonn::linear_forward": 8 * blocks, "axonn::all_reduce": 2 * blocks}


# --- Worlds that do not exist --------------------------------------------------------------------


def step_on_real_ranks(shape: GridShape) -> list[CommunicationRecord]:
    return trace_step(GPT2, ParallelConfig(), grid_of(shape), BATCH)


def test_fake_ranks_record_what_real_ones_do(pool):
    shape = GridShape(2, 1, 2)
    for rank, records in enumerate(pool(4).run(step_on_real_ranks, shape)):
        with fake_ranks(rank, 4):
            assert trace_step(GPT2, ParallelConfig(), Grid(2, 1, 2), BATCH, fake=True) == records


@pytest.mark.parametrize(
    "shape",
    [GridShape(x=4, y=4, z=8, data=4), GridShape(x=8, y=4, z=16, data=8)],
    ids=["512", "4096"],
)
@pytest.mark.parametrize("parallel", ["sharded", "replicated"])
def test_a_step_on_many_ranks_needs_neither_ranks_nor_memory(shape, parallel):
    config = ModelConfig(
        vocab_size=51200, hidden_size=8192, num_layers=4, num_heads=64, sequence_length=2048
    )
    batch, rank = 1024, shape.size // 3
    with fake_ranks(rank, shape.size), FakeTensorMode():
        grid = Grid(**shape.as_dict())
        own = torch.zeros(batch // (shape.data * shape.z), config.sequence_length).long()
        with trace_communication() as trace:
            model = models.build(config, grid, PARALLEL[parallel])
            model.loss(own, own).backward()
            sync_gradients(model)
            clip_grad_norm_(model, 1.0)
    assert trace.bytes_by_axis() == predicted_bytes(config, PARALLEL[parallel], shape, batch)


def test_meta_tensors_record_the_same():
    with fake_ranks(3, 8):
        grid = Grid(2, 2, 2)
        model = models.build(GPT2, grid).to("meta")
        own = torch.zeros(BATCH // 2, GPT2.sequence_length, dtype=torch.long, device="meta")
        with trace_communication() as trace:
            model.loss(own, own).backward()
            sync_gradients(model)
            clip_grad_norm_(model, 1.0)
        want = trace_step(GPT2, ParallelConfig(), grid, BATCH, fake=True)
        assert trace.records == want
        assert trace.bytes_by_axis() == predicted_bytes(
            GPT2, ParallelConfig(), GridShape(2, 2, 2), BATCH
        )
