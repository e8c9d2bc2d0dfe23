"""`bench links`: its measurements, fits and file, which the planner can read."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.calibrate.file import link_rows, machine_file, peak_flops
from axonn_ext.calibrate.fit import Point, fit, ring_steps
from axonn_ext.calibrate.plan import COLLECTIVES, SEND, Plan, group_shapes
from axonn_ext.cli.main import main
from axonn_ext.planner import load_machine
from axonn_ext.planner.step.tasks import Collective
from axonn_ext.spec.grid import COMMUNICATING, GridShape, divisors, grids_of


def test_every_group_of_every_grid_is_measured_once():
    shapes = group_shapes(8, by_axis=False)
    assert sorted((s.inner, s.size) for s in shapes) == [
        (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)
    ]  # fmt: skip
    by_axis = {(s.axis, s.inner, s.size) for s in group_shapes(8, by_axis=True)}
    wanted = {
        (axis, grid.inner(axis), getattr(grid, axis))
        for pipe in divisors(8)
        for grid in grids_of(8, pipe=pipe)
        for axis in COMMUNICATING
        if getattr(grid, axis) > 1
    }
    assert by_axis == wanted
    for shape in shapes:
        assert getattr(shape.grid, shape.axis) == shape.size and shape.grid.size == 8
    assert group_shapes(1, by_axis=True) == []


def test_messages_are_measured_where_stages_may_lie():
    assert {s.kinds for s in group_shapes(4, by_axis=False)} == {(*COLLECTIVES, SEND)}
    for shape in group_shapes(4, by_axis=True):
        assert (SEND in shape.kinds) == (shape.axis == "pipe")


def test_the_fit_finds_the_line_and_is_not_moved_by_one_bad_time():
    latency, speed = 2e-4, 5e6
    points = [Point(n, latency + n / speed, 0.0) for n in (256, 10_000, 40_000, 80_000)]
    line = fit(points)
    assert math.isclose(line.bytes_per_s, speed) and math.isclose(line.latency_s, latency)
    assert line.error < 1e-9
    late = fit([*points, Point(60_000, 2 * points[3].seconds, 0.0)])
    assert math.isclose(late.bytes_per_s, speed) and math.isclose(late.latency_s, latency)
    assert late.error > 0.3


def test_the_fit_gives_no_negative_latency_and_no_endless_bandwidth():
    flat = fit([Point(1, 1e-3, 0.0), Point(1000, 2e-3, 0.0), Point(2000, 1e-3, 0.0)])
    assert math.isclose(flat.bytes_per_s, 2e6) and flat.latency_s < 1e-3
    steep = fit([Point(1000, 1e-4, 0.0), Point(2000, 1e-3, 0.0), Point(3000, 2e-3, 0.0)])
    assert steep.latency_s == 0 and math.isclose(steep.bytes_per_s, 1e6)
    with pytest.raises(ValueError, match="at least three sizes"):
        fit([Point(1, 1.0, 0.0), Point(2, 2.0, 0.0), Point(2, 2.0, 0.0)])
    with pytest.raises(ValueError, match="positive times"):
        fit([Point(1, 0.0, 0.0), Point(2, 2.0, 0.0), Point(3, 3.0, 0.0)])


def measurements(by_axis: bool) -> dict[str, Any]:
    """Measurements of links of 1, 2, ... MB/s, one per group shape, with 1 ms latency per step."""
    links = []
    for number, shape in enumerate(group_shapes(4, by_axis=by_axis), 1):
        for kind in shape.kinds:
            latency = 1e-3 * ring_steps(kind, shape.size)
            points = [(n, latency + n / (number * 1e6), 0.0) for n in (1000, 10_000, 100_000)]
            links.append({
                "axis": shape.axis if by_axis else None, "inner": shape.inner,
                "size": shape.size, "kind": kind, "points": points,
            })  # fmt: skip
    product = {"dtype": "fp32", "m": 100, "n": 100, "k": 50, "layout": "NT", "spread_s": 0.0}
    return {
        "links": links, "products": [product | {"seconds": s} for s in (1e-3, 2e-3)],
        "memory_bytes": 1 << 30, "memory_bytes_per_s": 2e9, "launch_s": 1e-5,
        "attention": {"fp32": 3e9},
    }  # fmt: skip


@pytest.mark.parametrize("by_axis", [False, True])
def test_the_planner_reads_what_is_written(tmp_path: Path, by_axis: bool):
    measured = measurements(by_axis)
    text = machine_file(
        measured,
        num_ranks=4,
        ranks_per_core=2.0,
        device="cuda",
        description='a "name", 2 cores',
        source="measured",
    )
    assert tomllib.loads(text)["device"] == "cuda"
    assert tomllib.loads(text)["description"] == 'a "name", 2 cores'
    path = tmp_path / "here.toml"
    path.write_text(text)
    machine = load_machine(str(path))
    assert peak_flops(measured) == {"fp32": 1e9} == dict(machine.peak_flops)
    assert machine.launch_s == 1e-5 and machine.memory_bytes == 1 << 30
    every_grid_of_four = [grid for pipe in (1, 2, 4) for grid in grids_of(4, pipe=pipe)]
    for row in link_rows(measured):
        for grid in every_grid_of_four:
            if row.axis is not None and (
                (grid.inner(row.axis), getattr(grid, row.axis)) == (row.inner, row.size)
            ):
                check_link(machine, grid, row)


def check_link(machine: Any, grid: GridShape, row: Any) -> None:
    """Checks that a collective takes the measured time. Rows with an axis are of emulated links."""
    collective = Collective(row.axis, row.kind, 50_000, "activations")
    link = machine.link(grid, row.axis)
    seconds = machine.collective_seconds(collective, link, row.size)
    sending = 50_000 / row.line.bytes_per_s
    emulated = row.axis is not None
    want = max(row.line.latency_s, sending) if emulated else row.line.latency_s + sending
    assert math.isclose(seconds, want, rel_tol=1e-3)


def measure(plan_json: str) -> Mapping[str, Any]:
    from axonn_ext.calibrate.ranks import measure_machine

    return measure_machine(Plan.from_json(plan_json))


@pytest.mark.long
def test_two_ranks_measure_a_machine(pool: Any, tmp_path: Path):
    plan = Plan(2, "cpu", ("fp32",), rounds=1, threads=1, by_axis=False)
    first, second = pool(2).run(measure, plan.to_json())
    assert first["links"] == second["links"]  # the times of the slowest rank
    assert [(r["inner"], r["size"], r["kind"]) for r in first["links"]] == [
        (1, 2, kind) for kind in (*COLLECTIVES, SEND)
    ]
    assert len(first["products"]) == len(plan.products)
    path = tmp_path / "this.toml"
    text = machine_file(
        first, num_ranks=2, ranks_per_core=1.0, device=plan.device, description="d", source="s"
    )
    path.write_text(text)
    machine = load_machine("this", this_file=path)
    assert machine.device == "cpu" and machine.max_ranks == 2
    assert 1e6 < machine.peak_flops["fp32"] < 1e13
    assert 1e6 < machine.memory_bytes_per_s < 1e12


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--nproc", "0"], "--nproc: expected a whole number >= 1, got 0"),
        (["--rounds", "0"], "--rounds: expected a whole number >= 1, got 0"),
        (["--nproc", "2"], "AXONN_CACHE_DIR is empty, so nothing is kept: give --out"),
        (["what"], "unknown argument what"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, capsys: Any):
    assert main(["bench", "links", *arguments]) == 2
    assert words in capsys.readouterr().err
