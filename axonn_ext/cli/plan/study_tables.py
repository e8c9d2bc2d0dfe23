"""The texts about a study in `axonn-ext plan --study` and docs/published.md."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_ext.cli.plan.cells import gigabytes, options
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.published.retold import Line, Told, lines_of, mean_error
from axonn_ext.planner.published.runs import markdown_table
from axonn_ext.planner.published.study import Figure, Study

_UNITS = {"tflops_per_gpu": "Tflop/s a GPU", "tokens_per_s_per_gpu": "tokens/s a GPU"}
PLANNED = "*"  # after a grid that the planner chose, since none was published


def heads(study: Study) -> tuple[str, ...]:
    """Returns the heads of the table's columns."""
    series = ("its efficiency, modelled", "that of the best, modelled") if study.series else ()
    return (
        "machine", "model", "GPUs", "sequences", "reported", "as it ran", "as it ran, modelled",
        "error", "planned best", "planned best, modelled", *series,
    )  # fmt: skip


def rows(study: Study, told: Sequence[Told]) -> list[tuple[str, ...]]:
    """Returns the cells of the table, a row for each figure."""
    return [_row(study, line) for line in lines_of(told)]


def _row(study: Study, line: Line) -> tuple[str, ...]:
    told, case = line.told, line.told.row.case
    series = (_percent(line.efficiency), _percent(line.best_efficiency)) if study.series else ()
    return (
        case.machine, case.model_name, f"{case.num_ranks:,}", f"{case.batch_size:,}",
        _reported(line.figure, study), _as_it_ran(told), _modelled(line.figure, line.theirs),
        "-" if line.error is None else f"{100 * line.error:+.0f} %", _step(told.best),
        _modelled(line.figure, line.best), *series,
    )  # fmt: skip


def _as_it_ran(told: Told) -> str:
    text = _step(told.theirs, PLANNED if told.row.case.grid is None else "")
    if told.theirs is None or not told.too_large:
        return text
    needed, there = told.theirs.memory.total, told.machine.usable_bytes
    return f"{text}; would need {gigabytes(needed)} of {gigabytes(there)}"


def _step(step: Estimate | None, mark: str = "") -> str:
    """Returns grid, number of micro-batches and options of a step."""
    if step is None:
        return "nothing fits"
    grid = f"{step.job.grid.short()} {mark}".rstrip()
    parts = step.job.options.micro_batches
    batches = "1 micro-batch" if parts == 1 else f"{parts:,} micro-batches"
    return f"{grid}; {batches}; {options(step.job)}"


def _reported(figure: Figure, study: Study) -> str:
    if figure.reported is None:
        return "-"
    low, high = (_number(figure.kind, value) for value in figure.reported)
    text = f"{low if low == high else f'{low} to {high}'} {_unit(figure, study)}"
    return f"{text} ({figure.note})" if figure.note else text


def _modelled(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    unit = "%" if _unit_is_percent(figure.kind) else _UNITS[figure.kind]
    return f"{_number(figure.kind, value)} {unit}"


def _unit_is_percent(kind: str) -> bool:
    return kind not in _UNITS


def _number(kind: str, value: float) -> str:
    return f"{100 * value:.1f}" if _unit_is_percent(kind) else f"{value:,.0f}"


def _unit(figure: Figure, study: Study) -> str:
    match figure.kind:
        case "share_of_peak":
            return "% of peak"
        case "efficiency":
            return "% of the efficiency of the first row"
        case "faster":
            return f"% faster than {study.frameworks[figure.than]}"
    return _UNITS[figure.kind]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def assumptions(study: Study) -> list[str]:
    """Returns all inputs that the source does not state, those of single rows with their names."""
    of_rows = [
        f"{row.case.model_name} on {row.case.num_ranks:,} GPUs of {row.case.machine}: {row.assumed}"
        for row in study.rows
        if row.assumed
    ]
    return [*study.assumed, *of_rows]


def summary(told: Sequence[Told]) -> str:
    """Returns a sentence about the errors."""
    mean, count = mean_error(lines_of(told))
    text = f"Modelled as it ran, the mean absolute error of {count} figures is {100 * mean:.1f} %"
    apart = sum(line.figure.apart for line in lines_of(told))
    return f"{text}; {apart} more need what the planner does not have." if apart else f"{text}."


def markdown(study: Study, told: Sequence[Told]) -> str:
    """Returns the section of a study in docs/published.md, below its heading."""
    lists = (("Assumed", assumptions(study)), ("Not in the model", study.lacks))
    return "\n".join(
        (
            f"Source: {study.source}.\n",
            f"{study.says}\n",
            markdown_table(heads(study), rows(study, told)),
            f"{summary(told)}\n",
            *(f"{name}:\n\n" + "".join(f"* {t}\n" for t in texts) for name, texts in lists),
        )
    )
