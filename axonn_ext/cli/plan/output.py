"""Writes the output files of `axonn-ext plan`, and refuses those that it cannot write."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axonn_ext.cli.plan import files, report
from axonn_ext.cli.plan.budget import Budget
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.search.fastest import Plan
from axonn_ext.planner.simulation.pipelines import pipeline_timeline
from axonn_ext.planner.simulation.simulate import timeline
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_picture, check_writable, writing


def check_files(args: argparse.Namespace) -> None:
    """Raises UserError, before anything is planned, for files that cannot be written."""
    for name in ("json", "csv", "timeline", "write_config"):
        check_writable(f"--{name.replace('_', '-')}", getattr(args, name))
    check_picture("--plot", args.plot)
    if args.plot is not None and not _has_matplotlib():
        raise UserError("--plot needs matplotlib (pip install matplotlib)")
    if args.timeline is not None and args.timeline.suffix != ".json":
        raise UserError(f"--timeline: expected a name ending in .json, got {args.timeline}")
    picture = args.timeline and args.timeline.with_suffix(".png")
    asked = (args.json, args.csv, args.plot, args.timeline, picture, args.write_config)
    given = [file for file in asked if file]
    for file in given:
        if given.count(file) > 1:
            raise UserError(f"{file} would be written twice; give each file its own name")


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write(
    console: Console, args: argparse.Namespace, result: Plan, budget: Budget,
    more: Mapping[str, Any], others: Sequence[tuple[str, Estimate]],
) -> None:  # fmt: skip
    """Writes the requested files, and prints their names.

    more: the JSON's content besides the plan. others: further names and configurations to draw.
    """
    best, written, notes = result.configs[0], [], []
    if args.json is not None:
        files.write_json(args.json, files.plan_as_json(result, budget) | dict(more))
        written.append(args.json)
    if args.csv is not None:
        files.write_csv(args.csv, files.plan_as_rows(result, budget))
        written.append(args.csv)
    if args.plot is not None:
        from axonn_ext.cli.plan.plot import plot_plan

        with writing("--plot", args.plot):
            plot_plan(result, others, args.plot)
        written.append(args.plot)
    if args.timeline is not None:
        written += _write_timeline(args.timeline, best, result)
        notes += [files.left_out(args.timeline, best.job)]
    if args.write_config is not None:
        title = report.describe(result.request)
        files.write_config(args.write_config, best, title=title, model=args.model)
        written.append(args.write_config)
        if Path(args.model).suffix != ".toml":
            notes.append(f"{args.write_config}: set before a run: {files.NOT_PLANNED}")
    report.print_written(console, written)
    for note in filter(None, notes):
        say(console, note)


def _write_timeline(path: Path, best: Estimate, result: Plan) -> list[Path]:
    simulate = timeline if best.job.grid.pipe == 1 else pipeline_timeline
    step = simulate(best.job, result.request.machine)
    files.write_chrome_trace(path, step, best.job)
    if not _has_matplotlib():
        return [path]
    from axonn_ext.cli.plan.plot import plot_timeline

    picture = path.with_suffix(".png")
    with writing("--timeline", picture):
        plot_timeline(step, picture, title=report.subject(result.request, best))
    return [path, picture]
