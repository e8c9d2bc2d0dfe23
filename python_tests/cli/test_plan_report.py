"""How `axonn-ext plan` shows a configuration, and formats numbers."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from axonn_ext.cli.plan import cells, explain, report
from axonn_ext.planner import Request, load_machine, plan, simulate, timeline
from axonn_ext.planner.estimate import estimate as estimate_of
from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.events import COMPUTE
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.volumes import all_collectives
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.presets import PRESETS


@pytest.mark.parametrize("overlap", [None, Overlap()])
def test_explanation_of_an_axis(
    overlap: Overlap | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With only z, in every micro-batch: 7/8 of a block's weights are gathered in forward and again
    in backward, and 7/8 of their gradients are scattered. The table, which is also the head's
    weight, is gathered once; with overlap, at each of its three uses. Without overlap, all of this
    is exposed."""
    machine, model = load_machine("dgx-a100"), PRESETS["gpt2-small"]
    job = Job(model, GridShape(z=8), Options(micro_batches=2, overlap=overlap), 64)
    found = estimate_of(job, machine, memory_of(job))
    explain.print_explanation(Console(width=250), found, machine, number=1)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("z "))
    ranks, sent, speed, busy, hidden, exposed = map(float, re.findall(r"[\d.]+", line))
    blocks, table = 12 * 12 * 768**2, 50304 * 768
    assert ranks == 8
    assert sent == pytest.approx(
        2 * 7 / 8 * (3 * blocks + (2 if overlap is None else 4) * table) * 2 / 1e9, rel=0.01
    )
    assert ("if no gathered weight is held" in out) == (overlap is not None)
    if overlap is None:
        assert hidden == pytest.approx(0, abs=0.02) and exposed == pytest.approx(busy, abs=0.02)
        assert 1e3 * sent / speed < busy < 2e3 * sent / speed  # the rest is latency
    else:
        assert hidden > exposed


def test_a_wire_is_busy_for_as_long_as_it_carries_bytes() -> None:
    """A reported bug: x, z and data leave the node, so z and data pause while x sends. The time
    shown as busy was that from the first byte of a bucket to its last."""
    model = PRESETS["gpt-80b"]
    overlap = Overlap(gathered_bytes=160 << 20)  # keeps two MLP weights; there are 42 blocks
    for micro_batches in (1, 4):
        options = Options(overlap=overlap, algorithm="sequential", micro_batches=micro_batches)
        job = Job(model, GridShape(x=16, z=8, data=8), options, 1024)
        machine = load_machine("frontier")
        costs = Costs(machine, job.grid, "bf16")
        assert costs.wires["x"] == costs.wires["z"] == costs.wires["data"]
        expected: dict[str, float] = {}
        for c, times in all_collectives(make_program(job)):
            expected[c.axis] = expected.get(c.axis, 0.0) + times * costs.collective(c)
        busy = explain.busy_seconds(job, machine)
        assert busy == pytest.approx(expected, rel=0.05)  # z does not gather kept weights
        lasts = sum(e.end_s - e.start_s for e in timeline(job, machine).events if e.stream == "z")
        assert lasts > 1.2 * busy["z"]
        waits = simulate(job, machine).exposed_s
        assert all(waits[axis] <= busy[axis] * (1 + 1e-9) for axis in waits)


def test_kinds_of_computation_are_those_of_the_simulation() -> None:
    machine = load_machine("dgx-a100")
    request = Request(PRESETS["gpt2-small"], "small", 8, machine, 64)
    for estimate in plan(request).configs[:3]:
        kinds = explain.compute_kinds(estimate.job, machine)
        step = timeline(estimate.job, machine)
        assert sum(kinds.values()) + step.optimizer_s == pytest.approx(step.compute_s, rel=1e-6)
        busy = explain.busy_seconds(estimate.job, machine)
        streams = {event.stream for event in step.events} - {COMPUTE}
        assert set(busy) == streams


@pytest.mark.parametrize(
    ("value", "expected"),
    [(999.4, "999"), (1024, "1.02 k"), (80e9, "80.0 B"), (4194304, "4.19 M"), (0.5, "0.5")],
)
def test_sizes(value: float, expected: str) -> None:
    assert cells.size(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (12.34, "12.3 s"),
        (0.045, "45.0 ms"),
        (0.45, "450 ms"),
        (7.89e-4, "789 us"),
        (1234.0, "1,234 s"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert cells.duration(seconds) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(), "sharded, overlap"),
        (Options(layout="replicated", overlap=None), "replicated"),
        (Options(recompute="full"), "sharded, recompute full, overlap"),
        (Options(save_gathered=True), "sharded, save gathered, overlap"),
        (Options(reshard_after_forward=False), "sharded, weights kept, overlap"),
        (Options(heads_over_y=True), "sharded, heads over y, overlap"),
        (Options(overlap=Overlap(prefetch=3)), "sharded, overlap (3 ahead)"),
        (Options(optimizer=OptimizerOptions(2, "cpu")), "sharded, overlap, zero 2, offload cpu"),
    ],
)
def test_layout_overlap_and_what_is_no_default_are_told(options: Options, text: str) -> None:
    assert cells.options(Job(PRESETS["gpt2-small"], GridShape(z=8), options, 64)) == text


@pytest.mark.parametrize(
    ("gpus", "batch", "better"),
    [(256, 1000, 1024), (256, 1001, 1024), (256, 1024, None), (8, 1000, None), (64, 48, None)],
)
def test_a_batch_that_few_grids_divide(gpus: int, batch: int, better: int | None) -> None:
    request = Request(PRESETS["gpt2-small"], "gpt2", gpus, load_machine("dgx-h100"), batch)
    lines = report.batch_warning(request)
    assert bool(lines) == (better is not None)
    if lines:
        assert f"--global-batch {better} " in lines[-1]
