"""`axonn-ext bench train`: all systems train alike, or get no time; and the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from axonn_ext import GridShape
from axonn_ext.bench.launched import from_json, from_plain, to_json
from axonn_ext.bench.output import exit_status
from axonn_ext.bench.results import content_of
from axonn_ext.bench.train import command, options, report
from axonn_ext.bench.train.check import LOSS_BOUND, Trace, compare
from axonn_ext.bench.train.gpt import TorchGPT, load_whole
from axonn_ext.bench.train.plan import (
    BASELINES,
    STRONG,
    WEAK,
    MemoryUse,
    Plan,
    Row,
    SystemSpec,
    Workload,
)
from axonn_ext.bench.train.run import peak_of, time_systems, try_systems
from axonn_ext.bench.train.systems import (
    State,
    Step,
    System,
    build_system,
    torch_step,
)
from axonn_ext.calibrate.find_machine import machine_of_gpu
from axonn_ext.calibrate.measure import Ranks
from axonn_ext.cli.main import Parser
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.rows import RowsFile
from commands import AXONN, run, torchrun

SMALL = Workload(
    ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, sequence_length=16), 8
)
SMALL_OPTIONS = (
    "--hidden", "32", "--layers", "2", "--heads", "4", "--sequence", "16", "--batch", "8",
    "--vocabulary", "64", "--rounds", "2", "--device", "cpu",
)  # fmt: skip


def small_plan(
    num_ranks: int, kinds: tuple[str, ...], *grids: GridShape, **parallel: object
) -> Plan:
    systems = [SystemSpec(kind) for kind in kinds] + [SystemSpec("ours", g) for g in grids]
    return Plan(
        SMALL, ParallelConfig(**parallel), tuple(systems), num_ranks, single_threads=2, rounds=2
    )  # type: ignore[arg-type]


# --- Training alike ------------------------------------------------------------------------------


def errors_of_all(plan: Plan) -> dict[str, float]:
    """The larger error of each system; infinite if it has a problem."""
    tried = try_systems(plan, Ranks())
    assert all(each.memory is None for each in tried), "of CPUs it is measured in new processes"
    return {
        each.system.name: math.inf
        if each.verdict.problem
        else max(each.verdict.loss_error, each.verdict.norm_error)
        for each in tried
    }


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_system_trains_alike(pool, world_size):
    grids = {1: [GridShape()], 4: [GridShape(2, 2), GridShape(z=2, data=2)]}
    plan = small_plan(world_size, BASELINES, *grids[world_size])
    assert plan.problems() == []
    for errors in pool(world_size).run(errors_of_all, plan):
        assert list(errors) == [spec.name for spec in plan.systems]
        # Far below the limits, which are meant for runs of realistic size.
        assert max(errors.values()) < 5e-6, errors


def test_other_ways_to_run_train_alike(pool):
    plan = small_plan(
        4, ("single", "fsdp2"), GridShape(2, 2), layout="replicated", reshard_after_forward=False
    )
    divided = [SystemSpec("ours", GridShape(data=4), zero) for zero in (1, 2)]
    plan = dataclasses.replace(plan, systems=(*plan.systems, *divided))
    assert from_json(Plan, to_json(plan)) == plan
    for errors in pool(4).run(errors_of_all, plan):
        assert max(errors.values()) < 5e-6, errors


def test_every_system_trains_alike_in_bf16(pool):
    plan = small_plan(4, BASELINES, GridShape(2, 2), GridShape(z=4))
    plan = dataclasses.replace(plan, workload=dataclasses.replace(SMALL, dtype="bf16"))
    assert from_json(Plan, to_json(plan)) == plan
    for errors in pool(4).run(errors_of_all, plan):
        # A tenth of the limits, but more than the errors of fp32, to prove that bf16 is used.
        assert max(errors.values()) < 2e-3, errors
        assert min(error for name, error in errors.items() if name != "single") > 1e-5, errors


# --- A wrong system gets no time -----------------------------------------------------------------


def build_wrongly(spec: SystemSpec, plan: Plan, state: State | None) -> System:
    """Builds correct systems, except that `ddp` does not sum its gradients, `tp` reports a slightly
    wrong loss, and `fsdp2` fails."""
    right = build_system(spec, plan, state)
    if spec.kind == "ddp":
        assert state is not None
        model = TorchGPT(plan.workload.model)
        load_whole(model, state)
        part = {"part": dist.get_rank(), "num_parts": dist.get_world_size()}
        return dataclasses.replace(right, step=torch_step(model, plan.workload, **part))
    factors = {"tp": 1 + 3 * LOSS_BOUND, "fsdp2": math.nan}
    if spec.kind in factors:
        return dataclasses.replace(right, step=times(right.step, factors[spec.kind]))
    return right


def times(step: Callable[[], Step] | None, factor: float) -> Callable[[], Step]:
    assert step is not None

    def wrong() -> Step:
        loss, norm = step()
        return Step(loss * factor, norm)

    return wrong


def rows_of_wrong_systems(plan: Plan) -> list[Row]:
    return time_systems(plan, build=build_wrongly)


def test_a_wrong_system_gets_no_time(pool, tmp_path):
    plan = small_plan(2, ("single", "ddp", "fsdp2", "tp"), GridShape(x=2))
    in_bf16 = dataclasses.replace(plan, workload=dataclasses.replace(SMALL, dtype="bf16"))
    for rows in pool(2).run(rows_of_wrong_systems, in_bf16):
        assert [row.system for row in rows if row.problem is None] == ["single", "tp", "ours x=2"]
        assert {row.dtype for row in rows} == {"bf16"}
    for rows in pool(2).run(rows_of_wrong_systems, plan):
        by_name = {row.system: row for row in rows}
        for name in ("ddp", "fsdp2", "tp"):
            row = by_name[name]
            assert row.problem is not None and row.problem.startswith("wrong "), row
            assert row.median_ms is row.min_ms is row.tokens_per_s is row.ratio_to_single is None
        assert by_name["fsdp2"].loss_error is None
        assert by_name["tp"].loss_error == pytest.approx(3 * LOSS_BOUND, rel=0.1)
        for name in ("single", "ours x=2"):
            row = by_name[name]
            assert row.problem is None and row.rounds == 2
            assert row.device == "cpu" and row.peak_fraction is None and row.tflops is not None
            flops = SMALL.model.flops_per_token() * (row.tokens_per_s or 0.0)
            assert row.tflops == pytest.approx(flops / 1e12)
            assert row.median_ms is not None and row.median_ms >= (row.min_ms or math.inf) > 0
            tokens = SMALL.batch_size * SMALL.model.sequence_length
            assert row.tokens_per_s == pytest.approx(tokens / row.median_ms * 1e3)
        assert by_name["single"].num_threads == 2 and by_name["single"].ratio_to_single == 1.0
        assert exit_status(rows) == 1
        assert exit_status([by_name["single"], by_name["ours x=2"]]) == 0

        console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
        report.print_rows(console, rows, cores=2)
        text = console.export_text()
        assert text.count("it gets no time") == 3
        assert "fsdp2: wrong loss: nan" in text
        RowsFile("--json", tmp_path / "rows.json").write(content_of({}, rows))
        written = json.loads((tmp_path / "rows.json").read_text())["rows"]
        assert from_plain(list[Row], written) == rows


def test_the_verdict_on_a_trace():
    reference = Trace((6.0, 5.0), (1.0, 2.0))
    assert compare(reference, reference).problem is None
    for trace, word in (
        (Trace((6.0, 5.001), (1.0, 2.0)), "wrong loss"),
        (Trace((6.0, 5.0), (1.0, 2.002)), "wrong gradient norm"),
        (Trace((6.0, math.inf), (1.0, 2.0)), "wrong loss"),
        (Trace((6.0, 5.0), (math.nan, 2.0)), "wrong gradient norm"),
    ):
        assert word in (compare(trace, reference).problem or "")


# --- What is asked for ---------------------------------------------------------------------------


def arguments(*chosen: str) -> argparse.Namespace:
    parser = Parser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["train", "--device", "cpu", *chosen])


def test_the_default_plan_is_the_documented_one():
    (plan,) = command.make_plans(arguments())
    model = plan.workload.model
    assert (model.hidden_size, model.num_layers, model.sequence_length) == (512, 6, 256)
    assert (plan.workload.batch_size, plan.num_ranks, plan.rounds) == (16, 4, 10)
    names = [spec.name for spec in plan.systems]
    assert names == [*BASELINES, "ours x=2,y=2"]
    assert from_json(Plan, to_json(plan)) == plan


def test_defaults_depend_on_the_device():
    for device, dtype, batch, asked in (
        ("cpu", "fp32", 16, ()),
        ("cuda", "bf16", 8, ()),
        ("cuda", "fp32", 3, ("--dtype", "fp32", "--batch", "3")),
    ):
        args = arguments("--device", device, *asked)
        options.fill_in(args)
        assert (args.dtype, args.batch) == (dtype, batch)
        sizes = options.SIZES[device]
        assert (args.hidden, args.vocabulary) == (sizes["hidden"], sizes["vocabulary"])


def test_scaling_makes_a_launch_for_each_number_of_ranks():
    chosen = ("--nproc", "8", "--baseline", "ddp", "--grid", "1x1x4", "--grid", "2x2x2")
    strong = command.make_plans(arguments(*chosen, "--strong"))
    weak = command.make_plans(arguments(*chosen, "--weak"))
    assert [p.num_ranks for p in strong] == [p.num_ranks for p in weak] == [1, 2, 4, 8]
    assert [p.workload.batch_size for p in strong] == [16, 16, 16, 16]
    assert [p.workload.batch_size for p in weak] == [2, 4, 8, 16]
    for plan in strong:
        assert [spec.kind for spec in plan.systems] == ["single", "ddp", "ours"]
    assert [p.systems[-1].name for p in strong] == ["ours x=1", "ours x=2", "ours z=4",
                                                    "ours x=2,y=2,z=2"]  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("--grid", "2x2"), "grid must read like"),
        (("--nproc", "4", "--grid", "2x1x1"), "has 2 ranks, but 4 are started"),
        (("--nproc", "0"), "--nproc: expected a whole number >= 1, got 0"),
        (("--rounds", "0"), "--rounds: expected a whole number >= 1, got 0"),
        (("--nproc", "3"), "ddp: batch 16 must be divisible by the 3 ranks"),
        (("--nproc", "3"), "tp: heads 8 must be divisible by the 3 ranks"),
        (("--weak", "--batch", "6"), "--batch: 6 must be divisible by --nproc 4"),
        (("--grid", "1x4x1", "--batch", "2"), "ours y=4: sequences of a micro-batch: 2 must be"),
        (("--hidden", "100"), "hidden_size=100 must be divisible by num_heads=8"),
        (("--layout", "round"), "layout must be one of sharded, replicated, got 'round'"),
    ],
)
def test_mistakes_are_named_before_anything_starts(chosen, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        command.make_plans(arguments(*chosen))


# --- Charts and the command ----------------------------------------------------------------------


def made_up_row(kind: str, num_ranks: int, speed: float) -> Row:
    grid = GridShape(x=num_ranks).as_dict() if kind == "ours" else None
    return Row(
        kind, kind, grid, num_ranks, 1, 16, 0.0, 0.0, None, 1e6 / speed, 1e6 / speed, 1.0, 10,
        speed, speed / 100, MemoryUse(1 << 20, 0),
    )  # fmt: skip


@pytest.mark.parametrize("scaling", ["fixed", STRONG, WEAK])
def test_charts(tmp_path, scaling):
    counts = (4,) if scaling == "fixed" else (1, 2, 4)
    rows = [made_up_row(k, n, 100.0 * n) for n in counts for k in ("single", "ddp", "ours")]
    rows.append(
        dataclasses.replace(rows[0], system="tp", kind="tp", problem="wrong", tokens_per_s=None)
    )
    report.plot_rows(rows, "made up", tmp_path / "a.png", scaling=scaling, cores=2)
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_findings_say_who_is_ahead_and_what_is_noisy():
    run_ = [made_up_row("single", 1, 100), made_up_row("ddp", 4, 50), made_up_row("ours", 4, 75)]
    assert from_json(list[Row], to_json(run_)) == run_
    lines = report.findings(run_, cores=2)
    assert (
        lines[0] == "4 ranks: ours reaches 0.75 of single, 1.50 x the fastest of torch's on as "
        "many ranks (ddp)"
    )
    assert "4 ranks share 2 cores" in lines[1] and len(lines) == 2
    run_[1] = dataclasses.replace(run_[1], spread_ms=1e6)
    assert report.findings(run_, cores=4)[1].startswith("noisy (ddp)")


def test_the_table_of_gpus_has_the_share_of_the_peak(capsys):
    known = made_up_row("ours", 1, 50)
    known = dataclasses.replace(known, device="cuda", tflops=123.4, peak_fraction=0.375)
    unknown = dataclasses.replace(known, kind="single", system="single", peak_fraction=None)
    wrong = dataclasses.replace(
        known, median_ms=None, tflops=None, peak_fraction=None, problem="wrong loss", memory=None
    )
    report.print_rows(Console(width=200), [unknown, known, wrong], cores=0)
    head, *lines = capsys.readouterr().out.splitlines()
    assert "of peak" in head and "of it shared" not in head
    assert lines[1].split()[-5:-1] == ["123.4", "37.5%", "1", "MiB"]
    assert lines[0].split()[-5:-1] == ["123.4", "-", "1", "MiB"]
    assert lines[2].split()[3:10] == ["wrong", "-", "-", "-", "-", "-", "-"]
    assert not any("share 0 cores" in line for line in lines), "ranks of GPUs have one each"


def test_the_peak_is_that_of_a_known_gpu():
    assert machine_of_gpu("NVIDIA H100 80GB HBM3") == "dgx-h100"
    assert machine_of_gpu("GPU in software") is None
    assert peak_of("cpu", "bf16") is None


def test_rows_are_known_after_each_launch(monkeypatch):
    plans = command.make_plans(arguments("--nproc", "2", "--baseline", "single", "--strong"))
    asked: list[tuple[str, int]] = []

    def start(name: str, plan: Plan, num_ranks: int) -> object:
        assert (name, num_ranks) == ("train", plan.num_ranks)
        asked.append((plan.what, plan.num_ranks))
        if plan.what == "memory":
            return {"peak_bytes": 7, "shared_bytes": 3}
        rows = [made_up_row(spec.kind, plan.num_ranks, 100) for spec in plan.systems]
        return [dataclasses.asdict(dataclasses.replace(row, memory=None)) for row in rows]

    monkeypatch.setattr(command.launched, "start", start)
    written: list[list[MemoryUse | None]] = []
    rows = command._launch_all(
        plans, Console(quiet=True), weigh=True,
        write=lambda rows: written.append([row.memory for row in rows]),
    )  # fmt: skip
    use = MemoryUse(7, 3)
    assert [row.memory for row in rows] == [use] * 4
    assert asked == [("time", 1), ("memory", 1), ("memory", 1), ("time", 2), ("memory", 1),
                     ("memory", 2)]  # fmt: skip
    assert written == [
        [None, None], [use, None], [use, use], [use, use, None, None], [use, use, use, None],
        [use] * 4,
    ]  # fmt: skip


@pytest.mark.slow
def test_the_command_times_weighs_and_writes(tmp_path: Path):
    table, chart = tmp_path / "rows.json", tmp_path / "chart.png"
    chosen = [*SMALL_OPTIONS, "--hidden", "256", "--nproc", "2", "--baseline", "single"]
    done = run([*AXONN, "bench", "train", *chosen, "--json", str(table), "--plot", str(chart)])
    assert done.status == 0, done.output
    content = json.loads(table.read_text())
    assert content["machine"]["torch"] == torch.__version__
    rows = from_plain(list[Row], content["rows"])
    assert [row.system for row in rows] == ["single", "ours x=2"]
    states = 4 * 4 * 2 * 12 * 256**2  # weights, gradients, two moments of the blocks' matrices
    for row in rows:
        assert row.memory is not None and row.tokens_per_s is not None
        share = 1 if row.kind == "single" else 2
        assert states / share < row.memory.peak_bytes < 20 * states, row
    assert (rows[1].memory or MemoryUse(0, 0)).shared_bytes > 0
    assert chart.stat().st_size > 10_000
    assert "2 ranks: ours x=2 reaches " in done.output


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path):
    table = tmp_path / "rows.json"
    chosen = [*SMALL_OPTIONS, "--baseline", "tp", "--json", str(table)]
    done = run([*torchrun(2), "bench", "train", *chosen])
    assert done.status == 0, done.output
    rows = from_plain(list[Row], json.loads(table.read_text())["rows"])
    assert [row.system for row in rows] == ["single", "tp", "ours x=2"]
    assert all(row.tokens_per_s and row.memory is None for row in rows)


def test_a_mistake_has_status_2():
    done = run([*AXONN, "bench", "train", "--grid", "2x2"])
    assert (done.status, "grid must read like" in done.output) == (2, True)
