"""A simulated step: its times, and the events of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from axonn_ext.spec.grid import COMMUNICATING

COMPUTE = "compute"


class Event(NamedTuple):
    """A piece of work of one stream.

    stream  "compute" or the name of an axis; in the schedule of a pipeline, "stage 0", "stage 1"...
    busy_s  the seconds for which the stream really worked: a collective may pause in between, while
            another axis uses its wire
    """

    stream: str
    name: str
    start_s: float
    end_s: float
    busy_s: float
    micro_batch: int


class Timeline(NamedTuple):
    """A simulated step.

    compute_s    the seconds of computation, including the optimizer
    exposed_s    axis -> the seconds for which computation waited for it
    optimizer_s  the seconds of the optimizer
    events       all events; empty if only times were requested
    deferred_binds  whether the times may differ with a larger Overlap.deferred
    """

    step_time_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    optimizer_s: float
    events: tuple[Event, ...]
    deferred_binds: bool = True

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that have events: computation, then the axes; or the stages."""
        used = dict.fromkeys(event.stream for event in self.events)
        first = [stream for stream in (COMPUTE, *COMMUNICATING) if stream in used]
        return (*first, *(stream for stream in used if stream not in first))
