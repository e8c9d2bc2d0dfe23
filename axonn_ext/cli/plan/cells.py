"""Formats the numbers and options of a configuration for the commands that plan."""

from __future__ import annotations

from axonn_ext.cli.plan.budget import Budget
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.job import Job
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline_options import PipelineOptions

PEAK_TITLE = "% of peak: causal / all"  # half of attention counted, or all of it


def budget_heads(budget: Budget) -> list[str]:
    """Returns the columns for the cost of the whole training run, as far as it is known."""
    known = {"cost": budget.price, "MWh": budget.watts}
    return ["days", "GPU-hours", *(name for name, value in known.items() if value is not None)]


def budget_cells(budget: Budget, estimate: Estimate) -> list[str]:
    """Returns the cells of the columns of `budget_heads`."""
    numbers = (
        budget.days(estimate), budget.gpu_hours(estimate), budget.cost(estimate),
        budget.energy_mwh(estimate),
    )  # fmt: skip
    return [
        f"{number:,.1f}" if number < 1000 else size(number)
        for number in numbers
        if number is not None
    ]


def micro_batches(job: Job) -> str:
    """Returns the number of micro-batches, and their sequences over all GPUs."""
    return f"{job.options.micro_batches} x {job.micro_batch_size}"


def options(job: Job) -> str:
    """Returns the layout, and the options that are not the trainer's defaults."""
    chosen = job.options
    parts = [chosen.layout]
    if chosen.recompute != "none":
        parts.append(f"recompute {chosen.recompute}")
    for name in ("save_gathered", "heads_over_y"):
        if getattr(chosen, name):
            parts.append(words(name))
    if not chosen.reshard_after_forward:
        parts.append("weights kept")
    if chosen.overlap is not None:
        parts.append(f"overlap{numbers_of(chosen.overlap)}")
    parts += optimizer(chosen.optimizer)
    if job.grid.pipe > 1:
        parts.append(schedule(chosen.pipeline))
    return ", ".join(parts)


def numbers_of(chosen: Overlap) -> str:
    """Returns the numbers of an overlap that are not the trainer's defaults, in parentheses."""
    default, parts = Overlap(), []
    if chosen.gathered_bytes != default.gathered_bytes:
        parts.append(f"{chosen.gathered_bytes / (1 << 30):.3g} GiB gathered")
    if chosen.prefetch != default.prefetch:
        parts.append(f"{chosen.prefetch} ahead")
    if chosen.deferred != default.deferred:
        parts.append(f"{chosen.deferred} deferred")
    return f" ({', '.join(parts)})" if parts else ""


def optimizer(chosen: OptimizerOptions) -> list[str]:
    """Returns the optimizer, if not AdamW, and the options of its state other than defaults."""
    zero = ["muon"] if chosen.is_muon else []
    zero += [f"zero {chosen.zero}"] if chosen.zero else []
    return [*zero, f"offload {chosen.offload}"] if chosen.offload != "none" else zero


def schedule(pipeline: PipelineOptions) -> str:
    """Returns the name of a schedule, with its options that are not the defaults."""
    parts = [words(pipeline.schedule)]
    if pipeline.chunks > 1:
        parts.append(f"{pipeline.chunks} chunks")
    if pipeline.schedule == "message_driven" and not pipeline.defers:
        parts.append("whole backward")
    elif limit := pipeline.deferred_bytes:
        parts.append(f"at most {gigabytes(limit)} of weights later")
    return " with ".join(parts)


def peak(estimate: Estimate) -> str:
    """Returns % of peak with half of attention counted, since it is causal, and with all of it."""
    return f"{100 * estimate.peak_fraction:.1f} / {100 * estimate.whole_peak_fraction:.1f}"


def exposed(estimate: Estimate) -> str:
    """Returns the share of the step that waits for each axis."""
    shares = {axis: s / estimate.step_time_s for axis, s in estimate.exposed_s.items()}
    named = [f"{axis} {shares[axis]:.1%}" for axis in COMMUNICATING if shares.get(axis, 0) >= 5e-4]
    return ", ".join(named) or "-"


def gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"


def words(name: str) -> str:
    return name.replace("_", " ")


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def size(value: float) -> str:
    """Returns a number with three digits: 80.4 B, 4.19 M, 512."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Returns a time with three digits: 12.3 s, 45.6 ms, 789 us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(value: float) -> str:
    """Returns a number with three digits, or all digits of a whole number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")
