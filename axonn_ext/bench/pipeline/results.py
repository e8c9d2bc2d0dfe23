"""The results of a run: rows, and the targets that it should reach."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonn_ext.bench.benchmark import ratio_of_rounds
from axonn_ext.bench.pipeline.plan import BASE, OURS, CaseSpec, Plan
from axonn_ext.bench.pipeline.systems import Delays
from axonn_ext.spec.pipeline import bubble_seconds
from axonn_ext.spec.pipeline_simulator import simulate

MOST_ERROR = 1e-5  # of a gradient, compared with one process; fp32 sums in the same order
STAGES = "emulated: a stage's times are sleeps; messages, threads, orders and decisions are real"


@dataclass(frozen=True)
class Use:
    """What a step needed, by stage. deferred, held, deferred_bytes: None where they are not known.

    in_flight, deferred, held: the most micro-batches whose activations a stage held, whose weight
    gradients waited, and both together; for "interleaved", of one chunk each. decisions: the number
    sent to other ranks of the stage. decision_us: the leader's time for one; None without any.
    """

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...] | None
    held: tuple[int, ...] | None
    deferred_bytes: tuple[int, ...] | None
    decisions: tuple[int, ...]
    decision_us: float | None


@dataclass(frozen=True)
class Span:
    """A task that ran, for the timeline, in seconds from the start of the step."""

    kind: str
    chunk: int
    micro_batch: int
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Row:
    """One schedule with one mean delay of messages. A schedule with a `problem` has no time.

    delay           the mean delay, as a share of a micro-batch's time on a stage
    error           the largest relative error of a gradient, compared with one process
    median_s, low_s, high_s, min_s    the seconds of a step: median, quartiles and minimum
    ratio_to_1f1b   the median over rounds of t / t of 1f1b in the same round
    ratio_to_ideal  median_s / ideal_s, the time of a stage that never waits
    simulated_s     the median over rounds of the simulator's times, with the same delays
    formula_s       ideal_s and the bubble of the schedule's formula; only without delays
    samples_s       the seconds of each round
    """

    case: str
    system: str
    schedule: str
    stages: str
    grid: dict[str, int]
    micro_batches: int
    stage_ms: tuple[float, float, float]
    delay: float
    error: float | None
    problem: str | None
    rounds: int
    median_s: float | None
    low_s: float | None
    high_s: float | None
    min_s: float | None
    ratio_to_1f1b: float | None
    ratio_to_ideal: float | None
    ideal_s: float
    simulated_s: float | None
    formula_s: float | None
    samples_s: tuple[float, ...]
    use: Use | None
    timeline: tuple[tuple[Span, ...], ...]  # by stage, of the last round; empty if not known


def simulated_seconds(spec: CaseSpec, plan: Plan, delay: float, round_number: int) -> float:
    """Returns the simulator's time of a step with the delays of that round."""
    delays = Delays(plan.micro_batches, plan.stages * spec.chunks, plan.seed)
    delays.draw(delay * plan.micro_batch_s, round_number)
    options = spec.options(1)
    return simulate(
        spec.schedule, [plan.times(spec.chunks)] * plan.stages, plan.micro_batches,
        chunks=spec.chunks, message_seconds=delays.of_sender,
        in_flight=[options.most_in_flight(plan.stages, stage) for stage in range(plan.stages)],
        defer_weights=spec.defer_weights,
        max_deferred=spec.deferred or options.most_deferred(plan.stages),
    ).seconds  # fmt: skip


def formula_seconds(spec: CaseSpec, plan: Plan, delay: float) -> float | None:
    """Returns the time of a step by the bubble's formula; None if there is none."""
    if delay or spec.schedule == "message_driven":
        return None
    times = plan.times()
    return plan.ideal_s + bubble_seconds(
        spec.schedule, stages=plan.stages, chunks=spec.chunks,
        forward=times.forward, backward=times.backward, weight=times.weight,
    )  # fmt: skip


def make_row(
    spec: CaseSpec,
    plan: Plan,
    delay: float,
    *,
    error: float | None,
    problem: str | None,
    samples: Sequence[float],
    base: Sequence[float],
    use: Use | None,
    timeline: tuple[tuple[Span, ...], ...],
) -> Row:
    """Returns a row. samples, base: the seconds of each round, of this schedule and of 1f1b."""
    simulated = None
    if spec.system == OURS:
        simulated = statistics.median(
            simulated_seconds(spec, plan, delay, number) for number in range(plan.rounds)
        )
    median = low = high = None
    if samples:
        low, median, high = quartiles(samples)
    return Row(
        case=spec.name, system=spec.system, schedule=spec.schedule, stages=STAGES,
        grid=plan.grid.as_dict(), micro_batches=plan.micro_batches, stage_ms=plan.stage_ms,
        delay=delay, error=error, problem=problem, rounds=plan.rounds,
        median_s=median, low_s=low, high_s=high, min_s=min(samples, default=None),
        ratio_to_1f1b=ratio_of_rounds(samples, base),
        ratio_to_ideal=median and median / plan.ideal_s,
        ideal_s=plan.ideal_s, simulated_s=simulated,
        formula_s=formula_seconds(spec, plan, delay), samples_s=tuple(samples), use=use,
        timeline=timeline,
    )  # fmt: skip


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the first quartile, the median and the third one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


# --- The lines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A comparison of two schedules in the same rounds, with its target.

    ratio           the median over rounds of t_case / t_against
    low, high       the quartiles over rounds
    most            the largest ratio that meets the target
    simulated       the ratio of the simulator's times
    """

    delay: float
    case: str
    against: str
    ratio: float
    low: float
    high: float
    most: float
    simulated: float | None

    @property
    def holds(self) -> bool:
        return self.ratio <= self.most

    def sentence(self) -> str:
        where = f"delay {self.delay:g}" if self.delay else "without delays"
        said = "" if self.simulated is None else f", simulated {self.simulated:.3f}"
        verdict = "holds" if self.holds else "does not hold"
        return (
            f"{where}: {self.case} takes {self.ratio:.3f} x {self.against} "
            f"({self.low:.3f} to {self.high:.3f}{said}); aim: at most {self.most:.2f}: {verdict}"
        )


LATE_LINES = (
    ("message_driven-whole", BASE, 0.85),
    ("message_driven", "message_driven-whole", 0.92),
    ("message_driven", "zero_bubble", 0.90),
)
FREE_TOLERANCE = 1.02  # without delays, over the best of the other schedules


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """Returns the lines whose schedules were timed: at each delay, and without delays."""
    lines = []
    for delay in dict.fromkeys(row.delay for row in rows):
        timed = {row.case: row for row in rows if row.delay == delay and row.samples_s}
        if delay:
            asked = [line for line in LATE_LINES if line[0] in timed and line[1] in timed]
        else:
            asked = _free_lines(timed)
        lines += [_line(timed[case], timed[against], most) for case, against, most in asked]
    return lines


def _free_lines(timed: Mapping[str, Row]) -> list[tuple[str, str, float]]:
    """Compares message_driven with the best of all others, and its whole backward with 1f1b's."""
    others = [row for row in timed.values() if row.schedule != "message_driven"]
    if not others:
        return []
    best = min(others, key=lambda row: row.median_s or 0.0).case
    pairs = (("message_driven", best), ("message_driven-whole", BASE))
    return [(*pair, FREE_TOLERANCE) for pair in pairs if set(pair) <= set(timed)]


def _line(row: Row, other: Row, most: float) -> Line:
    ratios = [t / b for t, b in zip(row.samples_s, other.samples_s, strict=True)]
    low, median, high = quartiles(ratios)
    simulated = None
    if row.simulated_s is not None and other.simulated_s is not None:
        simulated = row.simulated_s / other.simulated_s
    return Line(row.delay, row.case, other.case, median, low, high, most, simulated)
