"""The options of a pipeline: its schedule, and limits on what its stages hold."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.files.keys import check, key
from axonn_ext.spec.pipeline import SCHEDULES

TRANSPORTS = ("auto", "c10d")


@dataclass(frozen=True)
class PipelineOptions:
    """How the stages of a pipeline run. No option changes a gradient beyond rounding.

    "message_driven": a stage runs whichever message has arrived; the others have a fixed order:
    "1f1b", "gpipe", "interleaved" (several chunks on each rank) and "zero_bubble" (1F1B, whose
    weight gradients are always computed later).

    Raises ValueError, which names the option, for an illegal value, and for options that do not
    apply to the chosen schedule.
    """

    schedule: str = key(
        "message_driven", f"order of the tasks of a stage: {', '.join(SCHEDULES)}",
        choices=SCHEDULES,
    )  # fmt: skip
    chunks: int = key(1, "virtual stages per rank; for interleaved", minimum=1)
    # With 1, the limit of 1F1B, running tasks as messages arrive gains next to nothing.
    in_flight: int = key(
        2, "limit of in_flight * (pipe - stage) micro-batches per stage; for message_driven",
        minimum=1,
    )  # fmt: skip
    defer_weights: bool = key(
        True, "compute weight gradients in idle time, not in backward; for message_driven"
    )
    deferred_bytes: int = key(
        0, "most bytes held for deferred weight gradients; 0: those of 2 x pipe micro-batches",
        minimum=0,
    )  # fmt: skip
    transport: str = key(
        "auto", "transport of messages: c10d, or auto (shared memory within a host, else c10d)",
        choices=TRANSPORTS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            least = ">= 2" if self.schedule == "interleaved" else "1"
            raise ValueError(
                f"chunks must be {least} with schedule {self.schedule!r}, got {self.chunks}"
            )
        if self.schedule == "zero_bubble" and not self.defer_weights:
            raise ValueError(
                "defer_weights must be true with schedule 'zero_bubble', got False (1F1B without "
                "deferred weight gradients is '1f1b')"
            )

    @property
    def defers(self) -> bool:
        """Whether weight gradients are computed separately from backward."""
        return self.schedule == "zero_bubble" or (
            self.schedule == "message_driven" and self.defer_weights
        )

    @property
    def shares(self) -> bool:
        """Whether ranks of one host send through shared memory."""
        return self.transport == "auto"

    def most_in_flight(self, stages: int, stage: int) -> int:
        """Returns the number of micro-batches that a stage of "message_driven" may hold."""
        return self.in_flight * (stages - stage)

    def most_deferred(self, stages: int) -> int | None:
        """Returns how many micro-batches' weight gradients may be deferred; None: bytes limit them.

        In simulation, a limit of twice the stages costs at most 1 % of a step compared with no
        limit, with messages that are late by 20 % of a micro-batch's time, on 2 to 16 stages.
        """
        return None if self.deferred_bytes else 2 * stages
