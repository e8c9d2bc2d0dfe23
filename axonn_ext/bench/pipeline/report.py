"""Shows rows: as tables on a terminal, and as timelines and bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_ext.bench.benchmark import number
from axonn_ext.bench.output import noisy, print_titled, style_of
from axonn_ext.bench.pipeline.plan import TORCH
from axonn_ext.bench.pipeline.results import STAGES, Row, lines_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal import charts
from axonn_ext.terminal.charts import BLUE, GREEN, GREY, INK, ORANGE, RED
from axonn_ext.terminal.console import Console, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = (
    "", "s a step", "quartiles", "vs 1f1b", "vs ideal", "simulated", "formula", "in flight",
    "deferred", "held", "decisions", "us each",
)  # fmt: skip


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Prints a table for each delay, and the conclusions from it."""
    lines = lines_of(rows)
    for delay in dict.fromkeys(row.delay for row in rows):
        group = [row for row in rows if row.delay == delay]
        cells = [(_cells(row), style_of(correct=not row.problem)) for row in group]
        findings = [line.sentence() for line in lines if line.delay == delay]
        print_titled(console, title(group[0]), _COLUMNS, cells, [*cautions(group), *findings])
    say(
        console, f"stages {STAGES}. in flight, deferred, held: the most micro-batches on a "
        "stage. What the columns mean: docs/benchmarks.md.", style="dim",
    )  # fmt: skip


def title(row: Row) -> str:
    """Returns what the rows with the same delay measured."""
    forward, backward, weight = row.stage_ms
    late = f"messages late by {percent(row.delay)} of it in the mean" if row.delay else "no delays"
    return (
        f"{GridShape(**row.grid).short()}, {row.micro_batches} micro-batches, emulated stages: "
        f"sleeps of {forward:g} + {backward:g} + {weight:g} ms a micro-batch; {late}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def cautions(group: Sequence[Row]) -> list[str]:
    """Returns what is wrong, and reasons to mistrust the numbers."""
    texts = [f"{row.case}: {row.problem}; it gets no time" for row in group if row.problem]
    if group[0].delay:  # random delays spread
        return texts
    return texts + noisy((r.case, r.median_s, (r.high_s or 0) - (r.low_s or 0)) for r in group)


def _cells(row: Row) -> tuple[str, ...]:
    if row.median_s is None or row.use is None:
        return (row.case, "wrong", *["-"] * (len(_COLUMNS) - 2))
    use = row.use
    decided = max(use.decisions)
    return (
        row.case,
        number(row.median_s, 3),
        f"{row.low_s:.3f} to {row.high_s:.3f}",
        number(row.ratio_to_1f1b, 3),
        number(row.ratio_to_ideal, 3),
        number(row.simulated_s, 3),
        number(row.formula_s, 3),
        str(max(use.in_flight)),
        "-" if use.deferred is None else str(max(use.deferred)),
        "-" if use.held is None else str(max(use.held)),
        str(decided) if decided else "-",
        number(use.decision_us, 0),
    )


# --- The chart -----------------------------------------------------------------------------------


SHOWN = ("1f1b", "zero_bubble", "message_driven-whole", "message_driven")
COLORS = {"forward": BLUE, "backward": GREEN, "weight": ORANGE}
_LANE_INCHES, _BAR_INCHES = 0.24, 0.27
_WIDTH, _LEFT, _RIGHT = 11.0, 2.1, 0.4  # inches


def plot_rows(rows: Sequence[Row], subtitle: str, path: Path) -> None:
    """Draws timelines of the largest delay, below them bars of every delay.

    A bar is the median with its interquartile range; a tick is the simulator's time. The suffix of
    the file's name decides the format.
    """
    delays = list(dict.fromkeys(row.delay for row in rows))
    groups = [[row for row in rows if row.delay == delay and row.median_s] for delay in delays]
    drawn = [row for row in rows if row.delay == max(delays) and row.case in SHOWN and row.timeline]
    lanes = [0.45 + _LANE_INCHES * len(row.timeline) for row in drawn]
    bars = [0.85 + _BAR_INCHES * len(group) for group in groups]
    height = 1.25 + sum(lanes) + 0.5 * bool(drawn) + sum(bars)
    left, shown = 0.3 / _WIDTH, title(rows[0]).partition(";")[0]
    size, head = (_WIDTH, height), "Schedules of a pipeline"
    figure = charts.new_figure(size, head, shown, subtitle, left=left)
    handles = _handles(with_timeline=bool(drawn))
    charts.add_legend(figure, handles, left=left, inches=0.9)
    top = height - 1.15
    longest = max((s.ended_s for row in drawn for stage in row.timeline for s in stage), default=1)
    for row, inches in zip(drawn, lanes, strict=True):
        axes = _axes(figure, top - inches + 0.15, inches - 0.45, height)
        _draw_timeline(axes, row, longest, is_last=row is drawn[-1])
        top -= inches
    top -= 0.5 * bool(drawn)
    for group, inches in zip(groups, bars, strict=True):
        axes = _axes(figure, top - inches + 0.45, inches - 0.85, height)
        _draw_bars(axes, group)
        top -= inches
    figure.savefig(path)


def _axes(figure: Figure, bottom: float, inches: float, height: float) -> Axes:
    return figure.add_axes(
        (_LEFT / _WIDTH, bottom / height, 1 - (_LEFT + _RIGHT) / _WIDTH, inches / height)
    )


def _draw_timeline(axes: Axes, row: Row, longest: float, *, is_last: bool) -> None:
    for stage, spans in enumerate(row.timeline):
        for kind, color in COLORS.items():
            places = [(s.began_s, s.ended_s - s.began_s) for s in spans if s.kind == kind]
            axes.broken_barh(places, (stage - 0.4, 0.8), color=color, edgecolor="white",
                             linewidth=0.4)  # fmt: skip
    axes.set_xlim(0, longest * 1.01)
    axes.set_ylim(len(row.timeline) - 0.4, -0.6)
    axes.set_yticks(
        range(len(row.timeline)), [f"stage {s}" for s in range(len(row.timeline))], fontsize=7
    )
    axes.set_title(f"{row.case}, {row.samples_s[-1]:.2f} s", loc="left", fontsize=9, color=INK)
    charts.styled(axes, size=7).spines["left"].set_visible(False)
    if not is_last:
        axes.set_xticklabels([])
    else:
        axes.set_xlabel("seconds of one step, that of the last round", fontsize=8, color=INK)


def _draw_bars(axes: Axes, group: Sequence[Row]) -> None:
    for place, row in enumerate(group):
        median, low, high = row.median_s or 0.0, row.low_s or 0.0, row.high_s or 0.0
        color = GREY if row.system == TORCH else BLUE
        axes.barh(place, median, height=0.72, color=color,
                  xerr=[[median - low], [high - median]], ecolor=INK,
                  error_kw={"elinewidth": 0.8})  # fmt: skip
        if row.simulated_s is not None:
            axes.plot([row.simulated_s] * 2, [place - 0.36, place + 0.36], color=RED, linewidth=2)
        axes.annotate(f"{median:.2f} s", (high, place), xytext=(5, 0), textcoords="offset points",
                      va="center", fontsize=7.5, color=INK)  # fmt: skip
    axes.axvline(group[0].ideal_s, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(group)), [row.case for row in group], fontsize=7.5)
    axes.set_ylim(len(group) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * max(row.high_s or 0.0 for row in group))
    delay = group[0].delay
    late = f"messages late by {percent(delay)} of a micro-batch in the mean"
    title_ = f"Seconds of a step, {late if delay else 'no delays'}"
    axes.set_title(title_, loc="left", fontsize=9, color=INK)
    charts.styled(axes, size=7.5)


def _handles(*, with_timeline: bool) -> list[Any]:
    """Returns what the legend shows."""
    from matplotlib.lines import Line2D

    label = "backward, with weight gradients unless deferred"
    colors = {label if kind == "backward" else kind: color for kind, color in COLORS.items()}
    return [
        *charts.patches((colors if with_timeline else {}) | {"torch's": GREY}),
        Line2D([], [], color=RED, linewidth=2, label="simulated"),
        Line2D([], [], color=INK, linestyle="--", label="no waiting"),
    ]
