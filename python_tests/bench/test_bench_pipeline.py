"""`axonn-ext bench pipeline`: emulated stages, delays, results from times, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from axonn_ext import GridShape
from axonn_ext.bench.launched import from_json, from_plain, to_json
from axonn_ext.bench.output import exit_status
from axonn_ext.bench.pipeline import command, report, run, systems
from axonn_ext.bench.pipeline.plan import CASES, CaseSpec, Plan
from axonn_ext.bench.pipeline.results import (
    Row,
    Span,
    Use,
    lines_of,
    make_row,
    simulated_seconds,
)
from axonn_ext.bench.pipeline.systems import (
    Delays,
    EmulatedLayer,
    Sleeper,
    System,
    build_ours,
    peaks,
)
from axonn_ext.cli.main import Parser
from axonn_ext.spec.pipeline import fixed_order
from axonn_ext.spec.pipeline_simulator import StageTimes
from axonn_ext.terminal.errors import UserError
from commands import AXONN, torchrun
from commands import run as run_command

pytestmark = pytest.mark.long

PLAN = Plan(tuple(CASES.values()), GridShape(pipe=2), 4, (4.0, 4.0, 4.0), (0.0, 0.2), rounds=2)


# --- Emulated stages -----------------------------------------------------------------------------


def test_a_layer_takes_the_time_it_is_told_and_computes_the_same() -> None:
    torch.manual_seed(0)
    linear, plain = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    plain.load_state_dict(linear.state_dict())
    layer = EmulatedLayer(linear, StageTimes(0.02, 0.03, 0.04), Sleeper())
    x = torch.randn(3, 4)
    began = time.perf_counter()
    y = layer(x)
    assert time.perf_counter() - began >= 0.02
    y.sum().backward()
    took = time.perf_counter() - began
    plain(x).sum().backward()
    assert torch.equal(y, plain(x)) and torch.equal(linear.weight.grad, plain.weight.grad)
    assert took >= 0.09


class Clock:
    """A clock on which each sleep lasts `late` seconds too long, and nothing else takes time."""

    def __init__(self, late: float) -> None:
        self.now, self._late = 0.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late


def test_what_a_sleep_took_too_long_the_next_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeper = Clock(late=0.25), Sleeper()
    monkeypatch.setattr(systems, "time", clock)
    for ends in (1.25, 2.25, 3.25):
        sleeper.sleep(1.0)
        assert clock.now == ends
    sleeper.sleep(0.5, began=clock.now - 2.0)  # already over: the clock is 1.75 s late
    assert clock.now == 3.5
    sleeper.sleep(3.0)
    assert clock.now == 3.5 + 3.0 - 2.0 + 0.25


def test_delays_are_the_same_for_every_schedule_of_a_round() -> None:
    delays, others = Delays(16, 4, seed=3), Delays(16, 4, seed=3)
    for each in (delays, others):
        each.draw(0.5, 7)
    places = [(d, s, m) for d in ("forward", "backward") for s in range(4) for m in range(16)]
    drawn = [delays.of_receiver(*place) for place in places]
    assert drawn == [others.of_receiver(*place) for place in places]
    assert 0.3 < sum(drawn) / len(drawn) < 0.7
    assert delays.of_sender("forward", 1, 5) == delays.of_receiver("forward", 2, 5)
    assert delays.of_sender("backward", 3, 5) == delays.of_receiver("backward", 2, 5)
    others.draw(0.5, 8)
    assert others.of_receiver("forward", 1, 0) != delays.of_receiver("forward", 1, 0)
    others.draw(0.0, 8)
    assert others.of_receiver("forward", 1, 0) == 0


def test_deferred_micro_batches_are_counted() -> None:
    order = list(fixed_order("zero_bubble", stages=4, stage=2, micro_batches=8))
    assert peaks(order, defers=True) == (3, 4)
    order = fixed_order("1f1b", stages=4, stage=1, micro_batches=8)
    assert peaks(order, defers=False) == (0, 3)


# --- Timing --------------------------------------------------------------------------------------


def rows_of(plan: Plan) -> list[Row]:
    return run.time_cases(plan)


def test_every_schedule_has_right_gradients_and_times(pool) -> None:
    rows = pool(2).run(rows_of, PLAN)[0]
    assert [(row.case, row.delay) for row in rows] == [
        *((name, 0.0) for name in CASES),
        *((name, 0.2) for name in CASES if not name.startswith("torch")),
    ]
    for row in rows:
        assert row.problem is None and row.error is not None and row.error < 1e-6, row
        assert len(row.samples_s) == 2 and row.median_s and row.median_s >= row.ideal_s
        assert row.use is not None and row.ideal_s == pytest.approx(4 * 0.012)
        assert (row.simulated_s is None) == row.case.startswith("torch")
        assert (row.formula_s is None) == (row.delay > 0 or row.schedule == "message_driven")
    by_name = {row.case: row for row in rows if row.delay}
    assert (
        by_name["1f1b"].use.in_flight == by_name["message_driven-1-whole"].use.in_flight == (2, 1)
    )
    assert by_name["gpipe"].use.in_flight == (4, 4)
    assert by_name["zero_bubble"].use.held == (2, 2)
    assert by_name["1f1b"].use.deferred == (0, 0) and by_name["1f1b"].ratio_to_1f1b == 1.0
    kinds = [span.kind for span in by_name["zero_bubble"].timeline[1]]
    assert sorted(kinds) == ["backward"] * 4 + ["forward"] * 4 + ["weight"] * 4
    assert from_json(Row, to_json(rows[0])) == rows[0]


def build_wrongly(*arguments: Any) -> System:
    """Builds correct schedules, except that "gpipe" reports slightly too large gradients."""
    system = build_ours(*arguments)
    if system.spec.name != "gpipe":
        return system
    return dataclasses.replace(
        system, gradients=lambda: {n: g * 1.01 for n, g in system.gradients().items()}
    )


def rows_of_a_wrong_schedule(plan: Plan) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "build_ours", build_wrongly)
        return run.time_cases(plan)


def test_wrong_gradients_get_no_time(pool) -> None:
    plan = dataclasses.replace(
        PLAN, cases=tuple(CASES[name] for name in ("1f1b", "gpipe")), delays=(0.0,),
        stage_ms=(1.0, 1.0, 1.0),
    )  # fmt: skip
    for rows in pool(2).run(rows_of_a_wrong_schedule, plan):
        fine, wrong = rows
        assert fine.problem is None and fine.median_s is not None
        assert wrong.problem is not None and "wrong gradients: error 1.0e-02" in wrong.problem
        assert wrong.median_s is wrong.ratio_to_1f1b is wrong.use is None
        assert exit_status(rows) == 1 and exit_status([fine]) == 0


@pytest.mark.slow
def test_ranks_of_a_stage_decide_together(pool) -> None:
    plan = dataclasses.replace(
        PLAN, grid=GridShape(x=2, pipe=2), delays=(0.2,), rounds=1,
        cases=(CASES["1f1b"], CaseSpec("message_driven", name="two", deferred=2)),
    )  # fmt: skip
    fixed, free = pool(4).run(rows_of, plan)[0]
    assert fixed.problem is free.problem is None
    assert fixed.use.decisions == (0, 0) and fixed.use.decision_us is None
    assert sum(free.use.decisions) > 0 and 0 < free.use.decision_us < 1e6
    assert max(free.use.deferred) <= 2


# --- What follows from times ---------------------------------------------------------------------


def made_up(name: str, delay: float, *samples: float) -> Row:
    spans = ((Span("forward", 0, 0, 0.0, 0.1), Span("backward", 0, 0, 0.1, 0.2)),)
    return make_row(
        CASES[name], PLAN, delay, error=0.0, problem=None, samples=samples, base=(1.0, 2.0),
        use=Use((1, 1), (0, 0), (1, 1), (0, 0), (3, 1), 20.0), timeline=spans,
    )  # fmt: skip


def test_lines_compare_the_same_rounds(tmp_path: Path) -> None:
    rows = [
        made_up("1f1b", 0.0, 1.0, 2.0), made_up("zero_bubble", 0.0, 0.9, 1.8),
        made_up("message_driven-whole", 0.0, 1.0, 2.0), made_up("message_driven", 0.0, 0.9, 1.8),
        made_up("1f1b", 0.2, 1.0, 2.0), made_up("message_driven-whole", 0.2, 0.8, 1.6),
        made_up("message_driven", 0.2, 0.76, 1.52),
    ]  # fmt: skip
    found = {(line.delay, line.case, line.against): line for line in lines_of(rows)}
    assert {key: (round(line.ratio, 3), line.holds) for key, line in found.items()} == {
        (0.0, "message_driven-whole", "1f1b"): (1.0, True),
        (0.0, "message_driven", "zero_bubble"): (1.0, True),
        (0.2, "message_driven-whole", "1f1b"): (0.8, True),
        (0.2, "message_driven", "message_driven-whole"): (0.95, False),
    }
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    report.print_rows(console, rows)
    text = console.export_text()
    assert "pipe=2, 4 micro-batches, emulated stages: sleeps of 4 + 4 + 4 ms" in text
    assert "messages late by 20% of it in the mean" in text
    assert "message_driven-whole takes 0.800 x 1f1b" in text and "does not hold" in text
    report.plot_rows(rows, "made up", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_simulator_gets_the_same_delays() -> None:
    plan = dataclasses.replace(PLAN, grid=GridShape(pipe=4), micro_batches=16)
    free = {name: simulated_seconds(CASES[name], plan, 0.0, 0) for name in CASES}
    assert free["1f1b"] == pytest.approx(57 * 0.004)
    assert free["interleaved"] == pytest.approx(52.5 * 0.004)
    assert free["zero_bubble"] == free["message_driven"] == pytest.approx(51 * 0.004)
    late = {name: simulated_seconds(CASES[name], plan, 0.2, 0) for name in CASES}
    assert late["message_driven"] < late["message_driven-whole"] < late["1f1b"]


# --- The command ---------------------------------------------------------------------------------


def arguments(*options: str) -> argparse.Namespace:
    parser = Parser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["pipeline", *options])


def test_the_default_plan_is_the_documented_one() -> None:
    plan = command.make_plan(arguments())
    assert (plan.grid, plan.micro_batches, plan.rounds) == (GridShape(pipe=4), 16, 10)
    assert (plan.stage_ms, plan.delays) == ((20.0, 20.0, 20.0), (0.0, 0.2))
    assert [case.name for case in plan.cases] == list(CASES)
    assert from_json(Plan, to_json(plan)) == plan
    # Cases that the sizes do not allow are left out unless requested.
    plan = command.make_plan(arguments("--grid", "pipe=4,x=2", "--micro-batches", "6"))
    left = set(CASES) - {"interleaved", "torch-1f1b", "torch-zero_bubble"}
    assert {case.name for case in plan.cases} == left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--grid", "2x2"), "grid must read like"),
        (("--grid", "x=2"), "--grid: expected at least 2 stages along pipe, got x=2"),
        (("--grid", "pipe=2,y=3"), "y and z together must divide 64, got x=1,y=3"),
        (("--stage-ms", "1,2"), "--stage-ms: expected milliseconds F,B,W, or one number, from 0"),
        (("--stage-ms", "0"), "not all 0, got '0'"),
        (("--stage-ms", "fast"), "got 'fast'"),
        (("--delay", "-1"), "--delay: expected a finite number >= 0 and <= 100, got -1"),
        (("--micro-batches", "0"), "--micro-batches: expected a whole number >= 1, got 0"),
        (("--rounds", "0"), "--rounds: expected a whole number >= 1, got 0"),
        (("--case", "dualpipe"), "invalid choice: 'dualpipe'"),
        (("--case", "interleaved", "--micro-batches", "6"), "got 6 micro-batches on 4 stages"),
        (("--case", "torch-1f1b", "--grid", "pipe=2,x=2"), "torch's stages have one rank each"),
        (("--case", "torch-1f1b", "--micro-batches", "2"), "do not run 2 micro-batches on 4"),
    ],
)
def test_mistakes_are_named_before_anything_starts(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        command.make_plan(arguments(*options))


def test_the_command_writes(tmp_path: Path) -> None:
    table, chart = tmp_path / "rows.json", tmp_path / "chart.png"
    options = ["--grid", "pipe=2", "--micro-batches", "4", "--stage-ms", "2,3,1", "--rounds", "2"]
    cases = ["--case", "zero_bubble", "message_driven"]
    files = ["--json", str(table), "--plot", str(chart)]
    done = run_command([*AXONN, "bench", "pipeline", *options, *cases, *files])
    assert done.status == 0, done.output
    content = json.loads(table.read_text())
    assert content["machine"]["torch"] == torch.__version__
    rows = from_plain(list[Row], content["rows"])
    assert [field.name for field in dataclasses.fields(Row)] == list(content["rows"][0])
    assert len(rows) == 3 + 3 and all(row.median_s for row in rows)
    assert "stages emulated: a stage's times are sleeps" in done.output
    assert [line["case"] for line in content["summary"]] == ["message_driven"] * 2
    assert chart.stat().st_size > 10_000


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    table = tmp_path / "rows.json"
    options = ["--grid", "pipe=2", "--micro-batches", "2", "--stage-ms", "1", "--rounds", "1"]
    done = run_command([*torchrun(2), "bench", "pipeline", *options, "--json", str(table)])
    assert done.status == 0, done.output
    assert len(json.loads(table.read_text())["rows"]) == 2 * len(CASES) - 2
    done = run_command([*torchrun(2), "bench", "pipeline"])
    assert done.status != 0 and "torchrun has started 2" in done.output
