"""`axonn-ext plan --study`: published studies next to the planner's predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from axonn_ext.cli.plan import files, report, study_tables
from axonn_ext.cli.plan.budget import Budget
from axonn_ext.planner.published.retold import Line, Told, lines_of, retell
from axonn_ext.planner.published.runs import held_out_error
from axonn_ext.planner.published.study import Study, load_study, study_names
from axonn_ext.spec.files.errors import InputError
from axonn_ext.terminal.console import new_table, print_table, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import writing

LIST, ALL = "list", "all"  # instead of a study's name
_OPTIONS = {"study", "json", "plot", "tokens"}  # options that a study also has


def check(args: argparse.Namespace) -> None:
    """Raises UserError for options of a plan, which a study sets itself."""
    given = [
        f"--{name.replace('_', '-')}"
        for name, default in args.defaults.items()
        if name not in _OPTIONS and getattr(args, name) != default
    ]
    if args.study == LIST:
        given += [f"--{name}" for name in ("json", "plot") if getattr(args, name) is not None]
    if given:
        raise UserError(f"--study {args.study}: expected no {', no '.join(given)}")


def run(console: Console, args: argparse.Namespace) -> None:
    """Lists the studies, or retells one or all of them. Raises UserError for an unknown name."""
    if args.study == LIST:
        _print_list(console)
        return
    try:
        studies = [load_study(name) for name in _names(args.study)]
    except InputError as error:
        raise UserError(f"--study: {error}") from None
    if args.plot is not None and not any(study.series for study in studies):
        known = ", ".join(name for name in study_names() if load_study(name).series)
        raise UserError(f"--plot draws only studies of series ({known}), got --study {args.study}")
    retold = [(study, retell(study)) for study in studies]
    for number, (study, told) in enumerate(retold):
        if number:
            say(console, "\n")
        _print(console, study, told)
    _write(console, args, retold)


def _names(name: str) -> list[str]:
    return study_names() if name == ALL else [name]


def _print_list(console: Console) -> None:
    heads = ("name", "study", "source")
    table = new_table(heads, heads)
    for name in study_names():
        study = load_study(name)
        table.add_row(name, study.title, study.source)
    print_table(console, table)


def _print(console: Console, study: Study, told: Sequence[Told]) -> None:
    heads = study_tables.heads(study)
    table = new_table(heads, heads)
    for row in study_tables.rows(study, told):
        table.add_row(*row)
    say(console, study.title, "bold")
    say(console, f"source: {study.source}")
    say(console, study.says)
    say(console, "")
    print_table(console, table)
    say(console, "")
    say(console, study_tables.summary(told))
    say(console, f"{study_tables.PLANNED}: the grid was not published, and is the planner's")
    lists = (("assumed", study_tables.assumptions(study)), ("not modelled", study.lacks))
    for name, texts in lists:
        say(console, f"{name}:")
        for text in texts:
            say(console, f"  {text}")


def _write(
    console: Console, args: argparse.Namespace, retold: Sequence[tuple[Study, tuple[Told, ...]]]
) -> None:
    written = []
    if args.json is not None:
        studies = [_as_json(study, told, tokens=args.tokens) for study, told in retold]
        files.write_json(args.json, {"studies": studies})
        written.append(args.json)
    if args.plot is not None:
        from axonn_ext.cli.plan.plot import plot_study

        study, told = next((study, told) for study, told in retold if study.series)
        with writing("--plot", args.plot):
            plot_study(study, told, args.plot, error=held_out_error())
        written.append(args.plot)
    report.print_written(console, written)


def _as_json(study: Study, told: Sequence[Told], *, tokens: float) -> dict[str, object]:
    """Returns the object that docs/interfaces.md describes."""
    return {
        "name": study.name,
        "title": study.title,
        "source": study.source,
        "assumed": study_tables.assumptions(study),
        "not_modelled": list(study.lacks),
        "figures": [_figure_as_json(line, tokens=tokens) for line in lines_of(told)],
    }


def _figure_as_json(line: Line, *, tokens: float) -> dict[str, object]:
    case, figure = line.told.row.case, line.figure
    theirs, best, machine = line.told.theirs, line.told.best, line.told.machine
    budget = Budget(tokens, watts=machine.watts)
    return {
        "machine": case.machine,
        "model": case.model_name,
        "gpus": case.num_ranks,
        "global_batch": case.batch_size,
        "kind": figure.kind,
        "than": figure.than or None,
        "reported": figure.reported and list(figure.reported),
        "modelled": line.theirs,
        "modelled_best": line.best,
        "error": line.error,
        "grid_published": case.grid is not None,
        "config": theirs and files.config_as_json(theirs, machine, budget),
        "best_config": best and files.config_as_json(best, machine, budget),
    }
