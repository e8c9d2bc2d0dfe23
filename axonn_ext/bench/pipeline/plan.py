"""The plan of a run of the benchmark, in plain values that its processes get as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.files.keys import keys_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.pipeline import check_sizes
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.pipeline_simulator import StageTimes

OURS, TORCH = "ours", "torch"
BASE = "1f1b"  # the schedule with which all others are compared
LAYERS_PER_STAGE = 2  # so that "interleaved" can split a stage
FEATURES, ROWS = 128, 64  # of a layer and a micro-batch; a message has 32 KiB
BYTES_PER_MICRO_BATCH = 2 * LAYERS_PER_STAGE * FEATURES * ROWS * 4  # x and dy of each Linear


@dataclass(frozen=True, kw_only=True)
class CaseSpec(PipelineOptions):
    """One schedule, with its options.

    system: "ours" or "torch". deferred: how many micro-batches' weight gradients may wait; 0: as
    many as PipelineOptions allows. deferred_bytes follows from it.
    """

    name: str
    system: str = OURS
    deferred: int = 0

    def options(self, ranks_per_stage: int) -> PipelineOptions:
        """Returns the options of our pipeline. A rank has its share of the deferred bytes."""
        held = self.deferred * BYTES_PER_MICRO_BATCH // ranks_per_stage
        options = {name: getattr(self, name) for name in keys_of(PipelineOptions)}
        return PipelineOptions(**options | {"deferred_bytes": held})


CASES = {
    spec.name: spec
    for spec in (
        CaseSpec("1f1b", name="1f1b"),
        CaseSpec("gpipe", name="gpipe"),
        CaseSpec("interleaved", name="interleaved", chunks=2),
        CaseSpec("zero_bubble", name="zero_bubble"),
        CaseSpec("message_driven", name="message_driven"),
        CaseSpec("message_driven", name="message_driven-c10d", transport="c10d"),
        CaseSpec("message_driven", name="message_driven-4", deferred=4),
        CaseSpec("message_driven", name="message_driven-1-4", in_flight=1, deferred=4),
        CaseSpec("message_driven", name="message_driven-whole", defer_weights=False),
        CaseSpec("message_driven", name="message_driven-1-whole", in_flight=1, defer_weights=False),
        CaseSpec("1f1b", name="torch-1f1b", system=TORCH),
        CaseSpec("zero_bubble", name="torch-zero_bubble", system=TORCH),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One launch.

    stage_ms: forward, input gradient and weight gradients of a stage for a micro-batch.
    delays: the mean delays of a message, as shares of a micro-batch's time on a stage.
    """

    cases: tuple[CaseSpec, ...]
    grid: GridShape
    micro_batches: int
    stage_ms: tuple[float, float, float]
    delays: tuple[float, ...]
    rounds: int
    seed: int = 0

    @property
    def stages(self) -> int:
        return self.grid.pipe

    @property
    def ranks_per_stage(self) -> int:
        """The ranks among which x, y and z split a stage."""
        return self.grid.x * self.grid.y * self.grid.z

    @property
    def micro_batch_s(self) -> float:
        """The seconds of one micro-batch on a stage."""
        return sum(self.stage_ms) / 1e3

    @property
    def ideal_s(self) -> float:
        """The seconds of a step of a stage that never waits."""
        return self.micro_batches * self.micro_batch_s

    def times(self, parts: int = 1) -> StageTimes:
        """Returns the seconds of one of `parts` equal parts of a stage."""
        return StageTimes(*(ms / 1e3 / parts for ms in self.stage_ms))

    def timed(self, case: CaseSpec) -> tuple[float, ...]:
        """Returns the delays with which the case runs. Torch's messages cannot be delayed."""
        return tuple(delay for delay in self.delays if case.system == OURS or delay == 0)


def problem_of(case: CaseSpec, grid: GridShape, micro_batches: int) -> str | None:
    """Returns why a case cannot run with these sizes; None if it can."""
    try:
        check_sizes(
            case.schedule, stages=grid.pipe, micro_batches=micro_batches, chunks=case.chunks
        )
    except ValueError as error:
        return str(error)
    if case.system == OURS:
        return None
    if grid.size > grid.pipe:
        return "torch's stages have one rank each"
    if micro_batches < grid.pipe or micro_batches % max(1, micro_batches // grid.pipe):
        return f"torch's schedules do not run {micro_batches} micro-batches on {grid.pipe} stages"
    return None
