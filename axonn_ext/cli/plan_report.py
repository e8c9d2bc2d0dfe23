"""Prints a plan: the table, what was rejected, and one configuration item by item."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from axonn_ext.cli.plan_budget import Budget
from axonn_ext.planner.costs import Costs
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.events import COMPUTE
from axonn_ext.planner.job import Job
from axonn_ext.planner.linear_passes import LinearPasses
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.pipelines import PipelineStep, simulate_pipeline
from axonn_ext.planner.ranges import step_range
from axonn_ext.planner.search.fastest import Plan
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.shares import shares_of
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.volumes import all_collectives, most_bytes_by_axis
from axonn_ext.planner.timeline import timeline
from axonn_ext.planner.uncertainty import RANGE, TIE, is_tie, published_range
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.terminal.console import plain_table, print_table, say

NEARLY_FULL = 0.9  # of the memory
PEAK_TITLE = "% of peak: causal / all"  # half of attention counted, or all of it
TIE_MARK = "="  # beside the number of a configuration


def print_plan(console: Console, result: Plan, budget: Budget, *, seconds: float) -> None:
    """Prints the request, the best configurations, and why others were rejected."""
    say(console, describe(result.request))
    say(
        console,
        f"{result.num_considered:,} configurations, of which {result.fits:,} are legal and fit; "
        f"planned in {seconds:.1f} s",
    )
    say(console, "")
    print_table(console, _table(result.configs, budget))
    for line in memory_warning(result.configs):
        say(console, line, "yellow")
    say(console, "")
    say(console, uncertainty(result.configs[0]))
    if any(result.rejected.values()):
        say(console, "")
        say(console, "rejected:")
    for reason, count in result.rejected.items():
        say(console, f"{count:>9,}  {reason}")


def memory_warning(configs: Sequence[Estimate]) -> list[str]:
    """Returns a line that names the configurations with which memory is nearly full, if any."""
    full = [str(n) for n, e in enumerate(configs, start=1) if e.memory_share > NEARLY_FULL]
    if not full:
        return []
    return [
        "",
        f"warning: number {', '.join(full)}: more than {NEARLY_FULL:.0%} of a GPU's memory is "
        "full, with communicators and what the machine reserves; fragmentation may make it run out",
    ]


def describe(request: Request) -> str:
    """Describes model, GPUs and batch in one line."""
    model = request.model
    return (
        f"{request.model_name} ({size(model.num_parameters())} parameters) on "
        f"{gpus(request.num_ranks)} of {request.machine.name}; a step of {request.batch_size:,} x "
        f"{model.sequence_length:,} = {size(request.batch_size * model.sequence_length)} tokens, "
        f"{request.dtype}"
    )


def subject(request: Request, estimate: Estimate) -> str:
    """Returns the title of a picture of one configuration."""
    return (
        f"{request.model_name} on {gpus(request.num_ranks)} of {request.machine.name}: "
        f"{estimate.job.grid.short()}"
    )


def uncertainty(best: Estimate) -> str:
    """Says how far the prediction may be off, and what the mark of ties means."""
    low, high = published_range(best.step_time_s)
    return (
        f"{TIE_MARK} at most {TIE:.0%} slower than the best, which a simulation cannot tell apart. "
        f"8 in 10 published steps on GPUs took {RANGE[0]:.2f} to {RANGE[1]:.2f} times what was "
        f"predicted; for the best that is {duration(low)} to {duration(high)}"
    )


def budget_heads(budget: Budget) -> list[str]:
    """Returns the columns of what the whole training takes, as far as it is known."""
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


def _table(configs: Sequence[Estimate], budget: Budget) -> Table:
    table = plain_table(padding=(0, 2, 0, 0))
    left = {"grid", "options", "exposed", "most of it", "limit"}
    for name in (
        "", "grid", "micro-batches", "options", "step", PEAK_TITLE, "tokens/s", "exposed",
        "memory", "most of it", *budget_heads(budget), "limit",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for number, e in enumerate(configs, start=1):
        table.add_row(
            f"{number} {TIE_MARK if number > 1 and is_tie(e, configs[0]) else ' '}",
            e.job.grid.short(), micro_batches(e.job), options(e.job),
            duration(e.step_time_s), peak(e), size(e.tokens_per_s),
            exposed(e), gigabytes(e.memory.total), words(e.memory.largest),
            *budget_cells(budget, e), e.binding, style="bold" if number == 1 else "",
        )  # fmt: skip
    return table


def print_explanation(
    console: Console, estimate: Estimate, machine: Machine, *, number: int
) -> None:
    """Prints memory, time and volumes of one configuration, item by item."""
    job = estimate.job
    say(console, "")
    say(console, f"number {number}: {job.grid}; {micro_batches(job)} sequences; {options(job)}")
    say(console, "")
    print_table(console, _memory_table(estimate, machine))
    say(console, "")
    print_table(console, _time_table(estimate, machine))
    say(console, "")
    say(console, _range_of(job, machine))
    if job.grid.pipe > 1:
        say(console, "")
        say(console, describe_pipeline(estimate, simulate_pipeline(job, machine)))
    if any(getattr(job.grid, axis) > 1 for axis in COMMUNICATING):
        say(console, "")
        print_table(console, _axes_table(estimate, machine))
    if job.options.overlap is not None and job.grid.z > 1:
        say(console, "")
        say(console, "GB sent: if no gathered weight is held from one use to the next")


def describe_pipeline(estimate: Estimate, pipeline: PipelineStep) -> str:
    """Describes the stages of a configuration, and how long they are modelled to wait."""
    job, slowest = estimate.job, pipeline.slowest
    layers = ", ".join(str(share.num_layers) for share in shares_of(job))
    of_slowest = pipeline.stages[slowest]
    seconds = of_slowest.forward + of_slowest.backward + of_slowest.weight
    return (
        f"pipeline: {schedule(job.options.pipeline)}, {job.grid.pipe} stages of {layers} blocks; "
        f"stage {slowest} is busy longest, {duration(seconds)} a micro-batch, and idles for "
        f"{pipeline.bubble:.1%} of the step (modelled; its time is above, the memory is that of "
        "the fullest stage, and GB sent are those of the stage that sends most)"
    )


def schedule(pipeline: PipelineOptions) -> str:
    """Returns the name of a schedule, with what is not its default."""
    parts = [words(pipeline.schedule)]
    if pipeline.chunks > 1:
        parts.append(f"{pipeline.chunks} chunks")
    if pipeline.schedule == "message_driven" and not pipeline.defers:
        parts.append("whole backward")
    elif limit := pipeline.deferred_bytes:
        parts.append(f"at most {gigabytes(limit)} of weights later")
    return " with ".join(parts)


def _range_of(job: Job, machine: Machine) -> str:
    found = step_range(job, machine)
    if not found.reasons:
        return "range: the machine's file says of nothing that it is not known"
    reasons = "; ".join(found.reasons)
    return f"range: {duration(found.least_s)} to {duration(found.most_s)} ({reasons})"


def _memory_table(estimate: Estimate, machine: Machine) -> Table:
    memory = estimate.memory
    table = numbers_table("memory of a GPU", "GB", "share")
    for name, num_bytes in memory._asdict().items():
        table.add_row(words(name), *_amount(num_bytes, memory.total))
    table.add_row("total", *_amount(memory.total, memory.total), style="bold")
    table.add_row(f"of {machine.name}", *_amount(machine.memory_bytes, machine.memory_bytes)[:1])
    return table


def _amount(num_bytes: int, total: int) -> tuple[str, str]:
    return f"{num_bytes / 1e9:,.2f}", f"{num_bytes / total:.0%}"


def time_kinds(estimate: Estimate, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a step by kind of work, and by axis that computation waits for."""
    rows = compute_kinds(estimate.job, machine)
    rows["optimizer"] = estimate.optimizer_s
    for axis in COMMUNICATING:
        if axis in estimate.exposed_s:
            rows[f"waiting for {axis}"] = estimate.exposed_s[axis]
    return rows


def _time_table(estimate: Estimate, machine: Machine) -> Table:
    table = numbers_table("time of a step", "ms", "share")
    for name, seconds in time_kinds(estimate, machine).items():
        table.add_row(name, f"{seconds * 1e3:,.2f}", f"{seconds / estimate.step_time_s:.1%}")
    table.add_row("step", f"{estimate.step_time_s * 1e3:,.2f}", "100.0%", style="bold")
    return table


def compute_kinds(job: Job, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a step for products, attention and elementwise work.

    In a pipeline, they are those of the stage that is busy longest.
    """
    program = make_program(job, _slowest(job, machine))
    costs = Costs(machine, job.grid, job.options.dtype)
    spent: defaultdict[str, float] = defaultdict(float)
    passes = LinearPasses(job, machine, costs)
    for tasks, repeats in program.micro_batch():
        for unit in passes.units(tasks):
            times = repeats * program.num_micro_batches
            attention = elementwise = 0.0
            for task in unit.tasks:
                attention += costs.compute(task._replace(matmul=None, touched_bytes=0))
                elementwise += costs.compute(task._replace(matmul=None, scores=None))
            computed = sum(done.compute_s for done in unit.passes)
            spent["products"] += times * (computed - attention - elementwise)
            spent["attention"] += times * attention
            spent["elementwise"] += times * elementwise
    return dict(spent)


def _slowest(job: Job, machine: Machine) -> int:
    """Returns the pipe coordinate that is busy longest."""
    return simulate_pipeline(job, machine).slowest if job.grid.pipe > 1 else 0


def _axes_table(estimate: Estimate, machine: Machine) -> Table:
    """Returns a table of the axes with several ranks: their bytes, and how much time is hidden."""
    job = estimate.job
    volumes = most_bytes_by_axis(job)
    busy = busy_seconds(job, machine)
    table = numbers_table("axis", "ranks", "GB sent", "GB/s", "busy ms", "hidden ms", "exposed ms")
    for axis in COMMUNICATING:
        ranks = getattr(job.grid, axis)
        if ranks == 1:
            continue
        waited = estimate.exposed_s.get(axis, 0.0)
        link = machine.link(job.grid, axis)
        table.add_row(
            axis, str(ranks), f"{volumes.get(axis, 0) / 1e9:,.3f}",
            f"{link.bytes_per_s / 1e9:,.1f}", f"{busy[axis] * 1e3:,.2f}",
            f"{max(0.0, busy[axis] - waited) * 1e3:,.2f}", f"{waited * 1e3:,.2f}",
        )  # fmt: skip
    return table


def busy_seconds(job: Job, machine: Machine) -> Mapping[str, float]:
    """Returns the seconds in which the wire of each axis carries its bytes in the simulated step.

    A collective that pauses while another axis uses the wire is not busy meanwhile. In a
    pipeline, they are those that the collectives and messages of the stage that is busy longest
    take by themselves.
    """
    busy: defaultdict[str, float] = defaultdict(float)
    if job.grid.pipe > 1:
        costs = Costs(machine, job.grid, job.options.dtype)
        for c, times in all_collectives(make_program(job, _slowest(job, machine))):
            busy[c.axis] += times * costs.collective(c)
        return busy
    for event in timeline(job, machine).events:
        if event.stream != COMPUTE:
            busy[event.stream] += event.busy_s
    program = make_program(job)
    costs = Costs(machine, job.grid, job.options.dtype)
    for c in program.sums_in_each:  # the events have those of the last micro-batch
        busy[c.axis] += (program.num_micro_batches - 1) * costs.collective(c)
    return busy


def print_written(console: Console, paths: Iterable[Path]) -> None:
    """Prints which files were written."""
    names = ", ".join(map(str, paths))
    if names:
        say(console, "")
        say(console, f"written: {names}")


def numbers_table(first: str, *others: str) -> Table:
    """Returns a table whose first column has names, and the others numbers."""
    table = plain_table(padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# --- Cells ---------------------------------------------------------------------------------------


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
    """Returns what is not the default of where AdamW's state is."""
    zero = [f"zero {chosen.zero}"] if chosen.zero else []
    return [*zero, f"offload {chosen.offload}"] if chosen.offload != "none" else zero


def peak(estimate: Estimate) -> str:
    """Returns % of peak with half of attention counted, which is causal, and with all of it."""
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
