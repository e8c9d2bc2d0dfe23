"""Pipelines of every schedule against one process of plain PyTorch: loss, gradients, norm."""

from __future__ import annotations

import pytest

from axonn_ext import GridShape
from axonn_ext.models import ParallelConfig
from axonn_ext.spec.parallel import Overlap
from pipeline_cases import OPTIONS, failures, state_is_kept

PAIRS = [GridShape(pipe=2, **{axis: 2}) for axis in ("x", "y", "z", "data")]
FOUR = [*PAIRS, GridShape(pipe=4)]
EIGHT = [
    GridShape(pipe=8), GridShape(pipe=4, x=2), GridShape(pipe=4, y=2), GridShape(pipe=4, z=2),
    GridShape(pipe=4, data=2), GridShape(pipe=2, x=2, z=2), GridShape(pipe=2, y=2, data=2),
]  # fmt: skip


def check(pool, world_size, *arguments, timeout_s: float = 240.0) -> None:
    for found in pool(world_size).run(failures, *arguments, timeout_s=timeout_s):
        assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 5), ("llama", 4)])
def test_equals_one_process(pool, name, layers) -> None:
    check(pool, 4, name, layers, FOUR, list(OPTIONS))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", 9), ("gpt2-untied", 8), ("llama", 8), ("llama-tied", 9)]
)
def test_equals_one_process_on_eight_ranks(pool, name, layers) -> None:
    check(pool, 8, name, layers, EIGHT, list(OPTIONS), timeout_s=800)


@pytest.mark.parametrize("options", ["message_driven, weights later", "interleaved"])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(layout="replicated"),
        ParallelConfig(recompute=True),
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
    "options", ["message_driven", "message_driven, weights later", "1f1b", "zero_bubble"]
)
def test_with_an_orchestrator_and_accumulated_steps(pool, options) -> None:
    check(pool, 4, "gpt2", 4, PAIRS[2:], [options], None, Overlap(bucket_bytes=4096), 1)
    check(pool, 4, "gpt2", 4, PAIRS[2:], [options], None, None, 3)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_two_stages(pool, options) -> None:
    check(pool, 2, "llama-tied", 4, [GridShape(pipe=2)], [options])


def test_one_stage(pool) -> None:
    """A pipeline of one stage is gradient accumulation."""
    one = [o for o in OPTIONS if o != "interleaved"]
    check(pool, 1, "gpt2", 2, [GridShape()], one)
    check(pool, 2, "gpt2", 2, [GridShape(x=2), GridShape(z=2)], one)


@pytest.mark.parametrize("chunks", [1, 2])
def test_whole_states(pool, chunks) -> None:
    for name in ("gpt2", "llama"):
        assert all(pool(4).run(state_is_kept, name, GridShape(pipe=2, z=2), chunks))
        assert all(pool(2).run(state_is_kept, name, GridShape(pipe=2), chunks))
    assert all(pool(4).run(state_is_kept, "llama-tied", GridShape(pipe=4), 1))


def blocks(shape: GridShape) -> list[str]:
    """The parameters of this rank, by name."""
    from axonn_ext.pipeline import PipelineOptions
    from pipeline_cases import config_of, make

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
