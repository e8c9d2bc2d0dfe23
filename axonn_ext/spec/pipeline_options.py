"""The options of a pipeline: its schedule, and how much its stages may hold."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.parallel import check_choice
from axonn_ext.spec.pipeline import SCHEDULES

TRANSPORTS = ("auto", "c10d")


@dataclass(frozen=True)
class PipelineOptions:
    """How the stages of a pipeline run. No option changes a gradient beyond rounding.

    schedule        "message_driven": a stage runs whichever message has arrived; the others have a
                    fixed order: "1f1b", "gpipe", "interleaved" (several chunks on each rank) and
                    "zero_bubble" (1F1B whose weight gradients are computed later)
    chunks          virtual stages on each rank; at least 2 for "interleaved", else 1
    in_flight       of "message_driven": how many micro-batches a stage may hold activations of, for
                    each stage from itself to the last one; 1 is what 1F1B holds, with which running
                    tasks as messages arrive gains next to nothing over a fixed order
    defer_weights   of "message_driven": computes weight gradients when no message is there, instead
                    of in backward ("zero_bubble" always computes them later, the others never)
    deferred_bytes  of "message_driven": when weight gradients wait with so many bytes of
                    activations and gradients, the oldest come first; 0: when those of twice as many
                    micro-batches wait as there are stages, which makes next to no step longer
    transport       "auto": messages between CPUs of one host go through memory that they share,
                    others over c10d; "c10d": all go over c10d

    Raises ValueError for an unknown schedule, a number below its least, and options of another
    schedule than the chosen one.
    """

    schedule: str = "message_driven"
    chunks: int = 1
    in_flight: int = 2
    defer_weights: bool = True
    deferred_bytes: int = 0
    transport: str = "auto"

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("transport", self.transport, TRANSPORTS)
        interleaves = self.schedule == "interleaved"
        for name, value, least in (
            ("chunks", self.chunks, 2 if interleaves else 1),
            ("in_flight", self.in_flight, 1),
            ("deferred_bytes", self.deferred_bytes, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"PipelineOptions: {name} must be >= {least} with schedule {self.schedule!r}, "
                    f"got {value!r}"
                )
        if self.chunks > 1 and not interleaves:
            raise ValueError(
                f"PipelineOptions: chunks={self.chunks} needs schedule 'interleaved', got "
                f"{self.schedule!r}"
            )
        if self.schedule == "zero_bubble" and not self.defer_weights:
            raise ValueError(
                "PipelineOptions: defer_weights must be true with schedule 'zero_bubble', got "
                f"{self.defer_weights!r} (1F1B without deferred weight gradients is '1f1b')"
            )

    @property
    def defers(self) -> bool:
        """Whether weight gradients are computed apart from backward."""
        return self.schedule == "zero_bubble" or (
            self.schedule == "message_driven" and self.defer_weights
        )

    @property
    def shares(self) -> bool:
        """Whether ranks of one host send through shared memory."""
        return self.transport == "auto"

    def most_in_flight(self, stages: int, stage: int) -> int:
        """Returns how many micro-batches a stage of "message_driven" may hold."""
        return self.in_flight * (stages - stage)

    def most_deferred(self, stages: int) -> int | None:
        """Returns for how many micro-batches weight gradients may wait; None: it depends on bytes.

        By simulation, twice the stages cost at most 1 % of a step beside no limit, with messages
        that are late by 20 % of a micro-batch's time, on 2 to 16 stages.
        """
        return None if self.deferred_bytes else 2 * stages
