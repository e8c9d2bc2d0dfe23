"""The streams of a simulated rank: computation, and one for each axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from axonn_ext.planner.simulation.events import COMPUTE, Event
from axonn_ext.planner.step.tasks import Collective
from axonn_ext.spec.grid import COMMUNICATING


class Streams:
    """When each axis is free, how long computation has waited for it, and the events.

    now        the time of computation
    computed   the seconds of it that were computation
    exposed    axis -> the seconds for which computation waited for it
    events     empty unless they are recorded
    """

    def __init__(
        self,
        now: float,
        computed: float,
        exposed: Mapping[str, float],
        *,
        micro_batch: int,
        records: bool,
    ) -> None:
        self.now, self.computed = now, computed
        self.exposed = defaultdict(float, exposed)
        self.free = dict.fromkeys(COMMUNICATING, 0.0)
        self.events: list[Event] = []
        self._micro_batch, self._records = micro_batch, records

    def compute(self, name: str, seconds: float) -> None:
        if seconds:
            self.record(COMPUTE, name, self.now, self.now + seconds, seconds)
        self.now += seconds
        self.computed += seconds

    def issue(self, c: Collective, seconds: float) -> float:
        """Starts a collective as soon as its axis is free; returns when it is done."""
        start = max(self.now, self.free[c.axis])
        self.free[c.axis] = start + seconds
        self.record(c.axis, f"{c.what}: {c.kind}", start, start + seconds, seconds)
        return start + seconds

    def wait_for(self, axis: str, end: float) -> None:
        if end > self.now:
            self.exposed[axis] += end - self.now
            self.now = end

    def record(self, stream: str, name: str, start: float, end: float, busy_s: float) -> None:
        if self._records:
            self.events.append(Event(stream, name, start, end, busy_s, self._micro_batch))
