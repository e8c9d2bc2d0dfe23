"""Draws plans: the times of the best configurations, steps over time, scaling, and studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_ext.cli.plan.cells import duration, micro_batches, options
from axonn_ext.cli.plan.report import describe
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.published.retold import Told, range_of_network, share_of_peak
from axonn_ext.planner.published.study import Study
from axonn_ext.planner.search.fastest import Plan
from axonn_ext.planner.simulation.events import COMPUTE, Event, Timeline
from axonn_ext.planner.simulation.pipelines import AFTER
from axonn_ext.planner.uncertainty import RANGE
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.terminal.charts import FADED, GREY, INK, blank_figure, draw_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXIS_COLORS = {"x": "#ea580c", "y": "#ca8a04", "z": "#16a34a", "data": "#9333ea",
                "pipe": "#be123c"}  # fmt: skip
_FORWARD, _BACKWARD, _WEIGHT, _OPTIMIZER = "#2563eb", "#1e40af", "#0891b2", "#64748b"
_PLANNED = "#16a34a"  # the planner's proposal next to what others ran
_ZOOM_EVENTS = 40  # events of the compute stream in the lower part of a timeline
_BAR_INCHES = 0.42


def plot_plan(result: Plan, others: Sequence[tuple[str, Estimate]], path: Path) -> None:
    """Draws a bar for each configuration: computation, waits for each axis, and the optimizer.

    others: names and configurations to draw below those of the plan.
    """
    named = [*(("", e) for e in result.configs), *others]
    configs = [estimate for _, estimate in named]
    height = 1.9 + _BAR_INCHES * len(configs)
    figure = blank_figure(11.0, height)
    axes = figure.add_axes((0.34, 0.55 / height, 0.54, 1 - 1.75 / height))
    for place, estimate in enumerate(configs):
        _draw_bar(axes, place, estimate)
    labels = [
        f"{name and name + ': '}{e.job.grid.short()}\n{micro_batches(e.job)}, {options(e.job)}"
        for name, e in named
    ]
    axes.set_yticks(range(len(configs)), labels, fontsize=7)
    axes.set_ylim(len(configs) - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * max(e.step_time_s for e in configs))
    axes.set_xlabel("seconds of a step", color=INK, fontsize=9)
    draw_frame(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="upper left", frameon=False, ncols=7,
                  bbox_to_anchor=(0.03, 1 - 0.8 / height), borderaxespad=0, fontsize=8.5,
                  labelcolor=INK)  # fmt: skip
    _title(figure, "Predicted step", describe(result.request))
    figure.savefig(path)


def _draw_bar(axes: Axes, place: int, estimate: Estimate) -> None:
    """Draws the parts of one step and its time; only the first bar with a part names it."""
    parts = {"compute": (estimate.compute_s - estimate.optimizer_s, _FORWARD)}
    for axis in COMMUNICATING:
        parts[f"waiting for {axis}"] = (estimate.exposed_s.get(axis, 0.0), _AXIS_COLORS[axis])
    parts["optimizer"] = (estimate.optimizer_s, _OPTIMIZER)
    begin = 0.0
    for name, (seconds, color) in parts.items():
        label = name if place == 0 else None
        axes.barh(place, seconds, left=begin, height=0.72, color=color, label=label)
        begin += seconds
    text = f"{duration(estimate.step_time_s)}, {100 * estimate.peak_fraction:.1f} %"
    axes.annotate(text, (begin, place), xytext=(4, 0), textcoords="offset points", va="center",
                  fontsize=8, color=INK)  # fmt: skip


def plot_timeline(step: Timeline, path: Path, *, title: str) -> None:
    """Draws the whole simulated step and, below, a part of it.

    The part is from the last micro-batch's backward; in a pipeline, from the first stage's step.
    """
    from matplotlib.patches import Patch

    streams = step.streams
    height = 2.2 + 0.7 * len(streams)
    figure = blank_figure(12.0, height)
    panel = (height - 2.3) / 2 / height
    whole = figure.add_axes((0.08, 1 - 1.05 / height - panel, 0.89, panel))
    part = figure.add_axes((0.08, 0.5 / height, 0.89, panel))
    begin, end = _window(step)
    for axes, (left, right) in ((whole, (0.0, step.step_time_s)), (part, (begin, end))):
        shown = [e for e in step.events if e.end_s > left and e.start_s < right]
        for row, stream in enumerate(streams):
            _draw_row(axes, row, [e for e in shown if e.stream == stream])
        axes.set_xlim(left * 1e3, right * 1e3)
        axes.set_ylim(len(streams) - 0.5, -0.5)
        axes.set_yticks(range(len(streams)), streams)
        draw_frame(axes, "x")
    part.set_xlabel("milliseconds", color=INK, fontsize=9)
    whole.axvspan(begin * 1e3, end * 1e3, color=GREY, alpha=0.35, linewidth=0)
    whole.set_xlabel("milliseconds; the shaded part is below", color=INK, fontsize=9)
    handles = [Patch(color=_FORWARD, label="forward"), Patch(color=_BACKWARD, label="backward")]
    if any(event.name.endswith("weight") for event in step.events):
        handles.append(Patch(color=_WEIGHT, label="weight gradients"))
    axes_used = [axis for axis in streams if axis in _AXIS_COLORS]
    handles += [Patch(color=_AXIS_COLORS[axis], label=f"axis {axis}") for axis in axes_used]
    figure.legend(handles=handles, loc="upper right", frameon=False, ncols=len(handles),
                  bbox_to_anchor=(0.97, 1 - 0.55 / height), labelcolor=INK, fontsize=8.5,
                  borderaxespad=0)  # fmt: skip
    waits = ", ".join(f"{axis} {duration(s)}" for axis, s in step.exposed_s.items() if s > 0)
    exposed = f"waiting for {waits}" if waits else "no waiting"
    _title(figure, title, f"simulated step of {duration(step.step_time_s)}; {exposed}")
    figure.savefig(path)


def _window(step: Timeline) -> tuple[float, float]:
    """Returns the times at which the lower part of the picture begins and ends."""
    last = max(event.micro_batch for event in step.events)
    events = [e for e in step.events if e.stream == step.streams[0]]
    if step.streams[0] == COMPUTE:
        events = [e for e in events if e.micro_batch == last]
    middle = int(0.6 * len(events))  # an event in backward
    near = events[max(0, middle - _ZOOM_EVENTS // 2) : middle + _ZOOM_EVENTS // 2]
    return near[0].start_s, near[-1].end_s


def _draw_row(axes: Axes, row: int, events: Sequence[Event]) -> None:
    spans = [(e.start_s * 1e3, (e.end_s - e.start_s) * 1e3) for e in events]
    colors = [_color(event) for event in events]
    # Tasks of a stage may follow each other without a gap and in one color.
    edge = 0.0 if not events or events[0].stream in (COMPUTE, *COMMUNICATING) else 0.3
    axes.broken_barh(
        spans, (row - 0.38, 0.76), facecolors=colors, edgecolor="white", linewidth=edge
    )


def _color(event: Event) -> str:
    if event.stream in _AXIS_COLORS:
        return _AXIS_COLORS[event.stream]
    if event.name in ("optimizer", AFTER):
        return _OPTIMIZER
    if event.name.endswith("weight"):
        return _WEIGHT
    backward = event.name.endswith(("dgrad", "wgrad", "backward"))
    return _BACKWARD if backward else _FORWARD


def plot_sweep(
    kind: str, points: Sequence[tuple[int, Estimate]], machine: Machine, path: Path, *,
    title: str, subtitle: str,
) -> None:  # fmt: skip
    """Draws speed and % of peak over a sweep's variable, with a line for linear scaling.

    kind: one of sweep.SWEEPS. The models of a series differ, so their speed is shown in flop/s; in
    other sweeps, in tokens/s. The line is drawn if the number of GPUs changes.
    """
    figure = blank_figure(9.6, 4.8)
    speed = figure.add_axes((0.09, 0.13, 0.38, 0.66))
    peak = figure.add_axes((0.58, 0.13, 0.38, 0.66))
    numbers = [number for number, _ in points]
    speeds, unit = [e.tokens_per_s for _, e in points], "tokens/s"
    if kind == "series":
        speeds, unit = [_flops(e, machine) / 1e15 for _, e in points], "model Pflop/s"
    if kind not in ("seq", "batch"):
        linear = [speeds[0] / numbers[0] * n for n in numbers]
        speed.plot(numbers, linear, "--", color=GREY, linewidth=1.3, label="linear")
    speed.plot(numbers, speeds, color=_FORWARD, marker="o", linewidth=2, label="predicted")
    speed.set_yscale("log")
    speed.legend(frameon=False, labelcolor=INK)
    speed.set_ylabel(unit, color=INK)
    _plot_peak(peak, points)
    label = {"seq": "tokens of a sequence", "batch": "sequences of a step"}.get(kind, "GPUs")
    for axes in (speed, peak):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [f"{n:,}" for n in numbers], fontsize=7, rotation=30)
        axes.minorticks_off()
        axes.set_xlabel(label, color=INK)
        draw_frame(axes)
    _title(figure, title, subtitle)
    figure.savefig(path)


def _flops(estimate: Estimate, machine: Machine) -> float:
    """Returns the model flop/s of all GPUs together."""
    of_all = machine.peak_flops[estimate.job.options.dtype] * estimate.job.grid.size
    return estimate.peak_fraction * of_all


def _plot_peak(axes: Axes, points: Sequence[tuple[int, Estimate]]) -> None:
    numbers = [number for number, _ in points]
    percents = [100 * e.peak_fraction for _, e in points]
    low, high = RANGE  # of times, so that the range of speeds has their inverses
    axes.fill_between(numbers, [p / high for p in percents], [p / low for p in percents],
                      color=_FORWARD, alpha=0.12, linewidth=0,
                      label="8 in 10 published runs")  # fmt: skip
    axes.plot(numbers, percents, color=_FORWARD, marker="o", linewidth=2)
    axes.legend(frameon=False, labelcolor=INK, loc="lower left", fontsize=8)
    for number, percent in zip(numbers, percents, strict=True):
        axes.annotate(f"{percent:.0f}", (number, percent), xytext=(0, 8), ha="center",
                      textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
    axes.set_ylim(0, max(percents) / low * 1.1)
    axes.set_ylabel("% of peak (causal attention)", color=INK)


def plot_study(study: Study, told: Sequence[Told], path: Path, *, error: float) -> None:
    """Draws % of peak over GPUs, a panel for each machine, as it ran and as planned.

    Dark bands are a network that is 20 % slower and faster; light ones add a share `error`.
    """
    machines = list(dict.fromkeys(t.row.case.machine for t in told))
    figure = blank_figure(4.0 * len(machines), 4.6)
    width = 0.94 / len(machines)
    for number, machine in enumerate(machines):
        axes = figure.add_axes((0.06 + number * width, 0.16, width - 0.04, 0.56))
        _draw_machine(axes, [t for t in told if t.row.case.machine == machine], error)
        axes.set_title(machine, color=INK, fontsize=10)
    figure.axes[0].set_ylabel("% of peak", color=INK)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="upper left", frameon=False,
                  ncols=3, bbox_to_anchor=(0.05, 0.855), borderaxespad=0, labelcolor=INK,
                  fontsize=8.5)  # fmt: skip
    _title(
        figure, study.title,
        "modelled; operations counted as the source does; dark bands: network 20 % slower and "
        f"faster; light bands: and the mean held-out error of published runs, {100 * error:.1f} %",
    )  # fmt: skip
    figure.savefig(path)


def _draw_machine(axes: Axes, told: Sequence[Told], error: float) -> None:
    gpus = [t.row.case.num_ranks for t in told]
    _draw_curve(axes, told, lambda t: t.best, error, _PLANNED, "planned best, modelled")
    _draw_curve(axes, told, lambda t: t.theirs, error, _FORWARD, "as it ran, modelled")
    reported = [
        (t.row.case.num_ranks, 100 * figure.reported[0])
        for t in told
        for figure in t.row.figures
        if figure.kind == "share_of_peak" and figure.reported is not None
    ]
    axes.plot(*zip(*reported, strict=True), linestyle="", marker="D", color=INK, label="reported")
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{n:,}" for n in gpus], fontsize=7, rotation=30)
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_xlabel("GPUs", color=INK)
    draw_frame(axes)


def _draw_curve(
    axes: Axes, told: Sequence[Told], step_of: Callable[[Told], Estimate | None], error: float,
    color: str, label: str,
) -> None:  # fmt: skip
    """Draws the shares of peak of the rows for which something fits."""
    shown = [(t, step) for t in told if (step := step_of(t)) is not None]
    gpus = [t.row.case.num_ranks for t, _ in shown]
    flops = [t.row.figures[0].flops for t, _ in shown]
    shares = [100 * share_of_peak(*of, rule) for of, rule in zip(shown, flops, strict=True)]
    ranges = [range_of_network(*of, rule) for of, rule in zip(shown, flops, strict=True)]
    low, high = ([100 * ends[i] for ends in ranges] for i in (0, 1))
    axes.fill_between(gpus, [(1 - error) * v for v in low], [(1 + error) * v for v in high],
                      color=color, alpha=0.12, linewidth=0)  # fmt: skip
    axes.fill_between(gpus, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(gpus, shares, color=color, marker="o", linewidth=2, label=label)


def _title(figure: Figure, title: str, subtitle: str) -> None:
    inches = figure.get_size_inches()[1]
    figure.text(0.03, 1 - 0.35 / inches, title, fontsize=14, fontweight="bold", color=INK)
    figure.text(0.03, 1 - 0.6 / inches, subtitle, fontsize=8.5, color=FADED)
