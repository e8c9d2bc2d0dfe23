"""Pipelines of every schedule against one process of plain PyTorch: loss, gradients, norm."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from axonn_ext import GridShape, clip_grad_norm_, full_gradients, full_state_dict
from axonn_ext.models import ParallelConfig
from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.pipeline import MicroBatch, Pipeline, PipelineError, PipelineOptions
from axonn_ext.pipeline.messages import BACKWARD
from axonn_ext.spec.parallel import Overlap
from grids import grid_of
from limits import HANG_SECONDS
from pipeline_cases import (
    OPTIONS,
    config_of,
    failures,
    frozen_errors,
    make,
    own_batches,
    state_is_kept,
)

PAIRS = [GridShape(pipe=2, **{axis: 2}) for axis in ("x", "y", "z", "data")]
FOUR = [*PAIRS, GridShape(pipe=4)]
EIGHT = [
    GridShape(pipe=8), GridShape(pipe=4, x=2), GridShape(pipe=4, y=2), GridShape(pipe=4, z=2),
    GridShape(pipe=4, data=2), GridShape(pipe=2, x=2, z=2), GridShape(pipe=2, y=2, data=2),
]  # fmt: skip


def check(pool, world_size, *arguments, timeout_s: float = HANG_SECONDS) -> None:
    for found in pool(world_size).run(failures, *arguments, timeout_s=timeout_s):
        assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("gpt2", 5), ("llama", 4)])
def test_equals_one_process(pool, name, layers) -> None:
    check(pool, 4, name, layers, FOUR, list(OPTIONS))


@pytest.mark.parametrize(("number", "options"), list(enumerate(OPTIONS)))
def test_sizes_that_nothing_divides(pool, number, options) -> None:
    """Each schedule runs on two grids, and each grid has at least two schedules."""
    shapes = [FOUR[(number + step) % len(FOUR)] for step in (0, 2)]
    check(pool, 4, "gpt2-odd", 5, shapes, [options])


@pytest.mark.parametrize("label", ["message_driven, whole backward", "message_driven", "1f1b"])
def test_stages_that_are_frozen(pool, label) -> None:
    of_all = set(pool(4).run(frozen_errors, OPTIONS[label], ())[0])
    for frozen in ((0,), (1, 2), (0, 1), (3,)):
        for found in pool(4).run(frozen_errors, OPTIONS[label], frozen):
            assert {"loss"} < found.keys() < of_all
            assert max(found.values()) < 1e-11, (frozen, found)


def differences_by_scale(label: str, overlaps: bool) -> list[str]:
    """Names of losses and gradients that a loss scale of 2**10 changes by more than the scale."""
    config, options, scale = config_of("llama-tied", 5), OPTIONS[label], 2.0**10
    found = []
    for loss_scale in (1.0, scale):
        model = make(config, GridShape(pipe=2, z=2), options, ParallelConfig())
        overlap = Overlap() if overlaps else None
        with Pipeline(model, model.grid, options, overlap=overlap) as pipeline:
            loss = pipeline.step(own_batches(model.grid), loss_scale=loss_scale)
            pipeline.sync_gradients()
            evaluated = pipeline.evaluate(own_batches(model.grid))
        assert abs(loss - evaluated) < 1e-11
        found.append({"loss": loss * loss_scale, **full_gradients(model)})
    # Scaling by a power of two causes no rounding.
    return [
        name for name, value in found[0].items() if not torch.equal(value * scale, found[1][name])
    ]


@pytest.mark.parametrize("label", list(OPTIONS))
def test_a_loss_scale_multiplies_every_gradient(pool, label) -> None:
    for different in pool(4).run(
        differences_by_scale, label, label in ("1f1b", "message_driven, whole backward")
    ):
        assert not different


def refusals_of_scales() -> list[str]:
    x, grid = torch.ones(1, 4), grid_of(GridShape(pipe=2))
    messages = []
    for dtype, scales in (
        (torch.float32, (0.0, 0.0)), (torch.float32, (float("inf"),) * 2),
        (torch.float32, (8.0, 16.0)), (torch.float32, (8.0, float("nan"))),
        (torch.float16, (2.0**16,) * 2),
    ):  # fmt: skip
        layers = [nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)]
        with pytest.raises((ValueError, PipelineError)) as error:
            with Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
                batch = (x.to(dtype), x.to(dtype))
                pipeline.step([batch], loss_scale=scales[grid.rank])
        messages.append(str(error.value))
    return messages


def test_loss_scales_that_do_not_fit_are_refused_on_every_rank(pool) -> None:
    for zero, infinite, differ, nan, narrow in pool(2).run(refusals_of_scales):
        assert "loss_scale must be positive and finite, got 0.0" in zero
        assert "loss_scale must be positive and finite, got inf" in infinite
        assert "all ranks must have the same loss_scale" in differ
        assert "from 8 to 16" in differ
        assert "all ranks must have the same loss_scale" in nan
        assert "loss_scale=65536 is more than a loss in torch.float16 can hold" in narrow


def frozen_on_the_first_stage() -> tuple[str, int]:
    config, shape, options = config_of("gpt2", 3), GridShape(pipe=3), PipelineOptions()
    model = make(config, shape, options, ParallelConfig())
    tables = [p for p in sharded_parameters(model) if p.spec.on_ends]
    for table in tables if model.grid.rank == 0 else ():
        table.parameter.requires_grad_(False)
    with pytest.raises(PipelineError) as error, Pipeline(model, model.grid, options) as pipeline:
        pipeline.step(own_batches(model.grid))
    return str(error.value), len(tables)


def test_a_tied_table_that_trains_on_one_end_alone_is_refused(pool) -> None:
    found = pool(3).run(frozen_on_the_first_stage)
    assert [count for _, count in found] == [1, 0, 1]
    for (message, _), own in zip(found, ("0", "none", "1"), strict=True):
        assert f"the same requires_grad of the tied table, got {own}, and from 0 to 1" in message


def losses_of_odd_rows() -> list[float]:
    """Losses and norms for three micro-batches of 15 tokens, on grids with x and without."""
    tokens = torch.randint(64, (3, 3, 6), generator=torch.Generator().manual_seed(1))
    batches = [MicroBatch(t[:, :-1], t[:, 1:]) for t in tokens]
    found = []
    for shape in (GridShape(pipe=2, x=2), GridShape(pipe=2, data=2)):
        model = make(config_of("gpt2", 4), shape, PipelineOptions(), ParallelConfig("replicated"))
        with Pipeline(model, model.grid) as pipeline:
            found.append(pipeline.step(batches).item())
            pipeline.sync_gradients()
        found.append(clip_grad_norm_(model, 1.0).item())
    return found


def test_rows_that_x_does_not_divide(pool) -> None:
    """In layout "replicated", each rank of x then sends all rows."""
    for loss, norm, want_loss, want_norm in pool(4).run(losses_of_odd_rows):
        assert loss == pytest.approx(want_loss, rel=1e-12)
        assert norm == pytest.approx(want_norm, rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", 9), ("gpt2-untied", 8), ("llama", 8), ("llama-tied", 9)]
)
def test_equals_one_process_on_eight_ranks(pool, name, layers) -> None:
    check(pool, 8, name, layers, EIGHT, list(OPTIONS), timeout_s=6 * HANG_SECONDS)


@pytest.mark.parametrize("options", ["message_driven", "interleaved"])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(layout="replicated"),
        pytest.param(ParallelConfig(recompute="full"), marks=pytest.mark.slow),
        pytest.param(ParallelConfig(heads_over_y=True), marks=pytest.mark.slow),
        pytest.param(
            ParallelConfig(save_gathered=True, reshard_after_forward=False), marks=pytest.mark.slow
        ),
    ],
    ids=["replicated", "recompute", "heads_over_y", "kept"],
)
def test_ways_to_run(pool, parallel, options) -> None:
    check(pool, 4, "llama-tied", 5, PAIRS, [options], parallel)


@pytest.mark.parametrize(
    "options",
    [
        "message_driven",
        *(pytest.param(o, marks=pytest.mark.slow)
          for o in ("message_driven, whole backward", "1f1b", "zero_bubble")),
    ],
)  # fmt: skip
def test_with_an_orchestrator_and_accumulated_steps(pool, options) -> None:
    check(pool, 4, "gpt2", 4, PAIRS[2:], [options], None, Overlap(bucket_bytes=4096), 1)
    check(pool, 4, "gpt2", 4, PAIRS[2:], [options], None, None, 3)


def test_two_stages(pool) -> None:
    check(pool, 2, "llama-tied", 4, [GridShape(pipe=2)], list(OPTIONS))


def test_one_stage(pool) -> None:
    """A pipeline of one stage is gradient accumulation."""
    one = [o for o in OPTIONS if o != "interleaved"]
    check(pool, 1, "gpt2", 2, [GridShape()], one)
    check(pool, 2, "gpt2", 2, [GridShape(x=2), GridShape(z=2)], one)


def bytes_over_data(label: str) -> int:
    """The bytes that the sums of one step send."""
    model = make(config_of("gpt2", 2), GridShape(data=2), OPTIONS[label], ParallelConfig())
    overlap = Overlap(bucket_bytes=1)
    with Pipeline(model, model.grid, OPTIONS[label], overlap=overlap) as pipeline:
        pipeline.step(own_batches(model.grid))
        pipeline.sync_gradients()
        assert pipeline.orchestrator is not None
        return pipeline.orchestrator.totals()["data"].bytes


def test_weight_gradients_that_wait_are_summed_no_more_often(pool) -> None:
    """The table on both end stages gets a gradient in backward, and the head's one later."""
    assert pool(2).run(bytes_over_data, "message_driven") == pool(2).run(bytes_over_data, "1f1b")


@pytest.mark.slow
def test_interleaved_on_four_stages(pool) -> None:
    check(pool, 4, "llama", 8, [GridShape(pipe=4)], ["interleaved"])


def replicas(shape: GridShape) -> tuple[float, float, float]:
    """Errors of a list of modules against one process, and the sum of the initial values."""
    grid = grid_of(shape)
    torch.manual_seed(grid.rank)  # each rank draws different initial values
    layers = [lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))] * 5
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(4, 8, 6, generator=generator).double() for _ in range(2))
    own = {1: ("data", "z")}
    pairs = list(zip(grid.shard(inputs, own), grid.shard(targets, own), strict=True))
    layers = [lambda make=make: make().double() for make in layers]
    with Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
        whole = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))
                              for _ in range(5)).double()  # fmt: skip
        state = full_state_dict(pipeline.module)
        whole.load_state_dict(state)
        loss = pipeline.step(pairs)
        pipeline.sync_gradients()
        found = full_gradients(pipeline.module)
    y = inputs.flatten(0, 1)
    for layer in whole:
        y = layer(y)
    want = F.mse_loss(y, targets.flatten(0, 1))
    want.backward()
    worst = max((found[n] - p.grad).norm() / p.grad.norm() for n, p in whole.named_parameters())
    values = torch.cat([t.flatten() for t in state.values()]).sum().item()
    return abs((loss - want) / want).item(), worst.item(), values


@pytest.mark.parametrize("shape", [GridShape(pipe=2, data=2), GridShape(pipe=2, x=2)], ids=str)
def test_a_list_of_modules(pool, shape) -> None:
    answers = pool(4).run(replicas, shape)
    assert all(loss < 1e-12 and gradients < 1e-11 for loss, gradients, _ in answers), answers
    assert len({values for _, _, values in answers}) == 1, "all replicas begin with equal values"


def first_gradient_is_late(direction: str, stage: int, micro_batch: int) -> float:
    """A late message delays those after it, so stage 0 gets all its gradients at once."""
    return 0.5 if (direction, stage, micro_batch) == (BACKWARD, 0, 0) else 0.0


def held(limit: int, in_flight: int = 2, micro_batches: int | None = None) -> tuple[int, int]:
    """The peak number of micro-batches in flight, and the peak bytes of deferred gradients.

    micro_batches: how many of them; None: all
    """
    options = PipelineOptions(in_flight=in_flight, deferred_bytes=limit)
    model = make(config_of("gpt2", 4), GridShape(pipe=2), options, ParallelConfig())
    # While a stage sleeps in backward, the next gradients arrive, even if its threads are slow.
    next(model.parameters()).register_hook(lambda _: time.sleep(0.1))
    with Pipeline(model, model.grid, options, delay=first_gradient_is_late) as pipeline:
        pipeline.step(own_batches(model.grid)[:micro_batches])
        return pipeline.stats.peak_in_flight, pipeline.stats.peak_deferred_bytes


def test_what_stages_hold_has_limits(pool) -> None:
    (first, _), (last, _) = pool(2).run(held, 1, 1)
    assert first <= 2 and last <= 1
    (_, one), _ = pool(2).run(held, 0, 2, 1)
    (_, most), _ = pool(2).run(held, 1)
    assert most == one, "with a limit of 1 byte, weight gradients follow each backward"
    flying, free = zip(*pool(2).run(held, 0), strict=True)
    assert flying[0] <= 4 and flying[1] <= 2
    assert one > 0 and free[0] >= 2 * one, "backwards come before weight gradients that are free"
    limit = one + 1
    (_, limited), _ = pool(2).run(held, limit)
    assert limited < limit + one, "a backward runs only while less than the limit waits"


@pytest.mark.parametrize("chunks", [1, 2])
def test_whole_states(pool, chunks) -> None:
    for name in ("gpt2", "llama"):
        assert all(pool(4).run(state_is_kept, name, GridShape(pipe=2, z=2), chunks))
        assert all(pool(2).run(state_is_kept, name, GridShape(pipe=2), chunks))
    assert all(pool(4).run(state_is_kept, "llama-tied", GridShape(pipe=4), 1))


def blocks(shape: GridShape) -> list[str]:
    """The names of this rank's parameters."""
    model = make(config_of("gpt2", 5), shape, PipelineOptions(), ParallelConfig())
    return [name for name, _ in model.named_parameters()]


def test_each_stage_has_its_own_modules(pool) -> None:
    first, last = pool(2).run(blocks, GridShape(pipe=2))
    for number in range(5):
        here = [any(n.startswith(f"blocks.{number}.") for n in names) for names in (first, last)]
        assert here.count(True) == 1
    assert "wte.weight" in first and "wte.weight" in last  # tied to the head
    assert "wpe.weight" in first and "wpe.weight" not in last
    assert "norm.weight" in last and "norm.weight" not in first
