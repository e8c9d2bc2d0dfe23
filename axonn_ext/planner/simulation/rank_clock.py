"""The clock of one rank: what it runs, and the weights that it gathers ahead (see passes.py)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from axonn_ext.planner.simulation.events import Event
from axonn_ext.planner.simulation.prepared_step import (
    Item,
    OnPath,
    Part,
    Schedule,
    Use,
    WireAxes,
)


class Passes(NamedTuple):
    """The state after all forward and backward passes.

    backward_s  the time at which the last micro-batch's backward began
    used_s      the seconds since backward_s for which other axes used the data axis' wire
    z_free_s    the time at which the last reduce-scatter over z is done
    deferred_binds  whether the times may differ if more sums over z could be under way
    """

    end_s: float
    compute_s: float
    backward_s: float
    used_s: float
    z_free_s: float
    exposed_s: Mapping[str, float]
    events: tuple[Event, ...] = ()
    deferred_binds: bool = True

    def extended(self, other: Passes, factor: float) -> Passes:
        """Returns self + factor * (other - self) in every number."""

        def on(a: float, b: float) -> float:
            return a + factor * (b - a)

        mine, yours = self.exposed_s, other.exposed_s
        exposed = {
            axis: max(0.0, on(mine.get(axis, 0.0), yours.get(axis, 0.0)))
            for axis in {**mine, **yours}
        }
        return Passes(
            on(self.end_s, other.end_s), on(self.compute_s, other.compute_s),
            on(self.backward_s, other.backward_s), on(self.used_s, other.used_s),
            on(self.z_free_s, other.z_free_s), exposed,
            deferred_binds=self.deferred_binds or other.deferred_binds,
        )  # fmt: skip

    def less(self, longer: Passes) -> Passes:
        """Returns how much longer the other passes take; they must begin like these."""
        exposed = {
            axis: max(0.0, seconds - self.exposed_s.get(axis, 0.0))
            for axis, seconds in longer.exposed_s.items()
        }
        compute_s = longer.compute_s - self.compute_s
        return Passes(compute_s + sum(exposed.values()), compute_s, 0.0, 0.0, 0.0, exposed)


class Gathers:
    """The gathers of a schedule's weights: which of them begin, and when they end, in z's time.

    A use starts the gathers of the next `prefetch` weights, as long as they fit within the budget
    together with the one in use. Other held weights give way, since they are needed later. In a
    pipeline, no pass knows what the next one uses.
    """

    def __init__(self, schedule: Schedule, prefetch: int, budget: float) -> None:
        self._uses, self._sums = schedule.uses, schedule.sums
        self._prefetch, self._budget = prefetch, budget
        self._count, self._now = len(self._uses), 0  # number of uses; index of the next one
        self.ends: list[float] = []

    def first(self, count: int) -> Gathers:
        """Returns a copy that continues from the same use and ends after the first `count` uses."""
        twin = copy(self)
        twin._count, twin.ends = count, self.ends.copy()
        return twin

    def begin(self) -> Sequence[Use]:
        """Returns the uses whose gathers the next use starts; the caller adds their ends."""
        number, uses, sums = self._now, self._uses, self._sums
        self._now += 1
        begun, base, in_pass = len(self.ends), sums[number], uses[number].in_pass
        stop, last = max(begun, number + 1), min(self._count, number + self._prefetch + 1)
        while stop < last:
            if sums[stop + 1] - base > self._budget or uses[stop].in_pass != in_pass:
                break
            stop += 1
        return uses[begun:stop]

    def end_of_last(self) -> float:
        """Returns when the gather of the most recent use ends."""
        return self.ends[self._now - 1]


class Run:
    """The clock of a run: the path's time, and the time of the axis z.

    z's time stands still while the path uses z's wire. `_behind` is how far it is behind real time.
    """

    def __init__(self, axes: WireAxes, *, overlaps: bool, records: bool) -> None:
        self._overlaps, self._on_z, self._records = overlaps, axes.on_z, records
        self._z_uses_data = "z" in axes.on_data
        self._now = self._backward_from = 0.0
        self._z_free = self._behind = 0.0
        self._used = 0.0  # the seconds for which other axes used the data axis' wire
        self._z_exposed = 0.0
        self._deferred_binds = False
        self._counts: Counter[int] = Counter()  # of parts with the same items, by their id
        self._items: dict[int, Sequence[Item]] = {}
        self._scatters: deque[float] = deque()
        self._pauses: list[tuple[float, float]] = []  # when z's time stood still, and how long
        self._events: list[Event] = []
        self._z_events: list[Event] = []

    def go_on(self, parts: Iterable[Part], gathers: Gathers, deferred: int) -> None:
        """Runs further parts; most of a search's time is spent here.

        deferred: the number of scatters that may be under way.
        """
        now, behind, used, free = self._now, self._behind, self._used, self._z_free
        records, uses_data = self._records, self._z_uses_data
        scatters, ends = self._scatters, gathers.ends
        for part in parts:
            if part.is_backward_begun:
                self._backward_from, used = now, 0.0
            self._counts[id(part.items)] += 1
            self._items[id(part.items)] = part.items
            for item in part.items:
                if isinstance(item, OnPath):
                    now += item.seconds
                    behind += item.on_z
                    used += item.on_data
                    if records:
                        self._record_path(item, part, now, behind)
                    continue
                is_use = item.kind == "use"
                for point in gathers.begin() if is_use else (item,):
                    seconds = point.seconds
                    if seconds or not is_use:
                        start = max(now - behind, free)
                        free = start + seconds
                        if uses_data:
                            used += seconds
                        if records:
                            of = point.part if isinstance(point, Use) else part
                            self._record_z(of, point.name, start, free, seconds)
                    if is_use:  # a weight that is held is there at once
                        ends.append(free if seconds else 0.0)
                if is_use:
                    end = gathers.end_of_last()
                elif item.kind == "wait":
                    end = free
                else:
                    scatters.append(free)
                    if len(scatters) <= deferred:
                        continue
                    end = scatters.popleft()
                late = end + behind - now
                if late > 0:
                    self._z_exposed += late
                    now += late
                    if item.kind == "scatter":
                        self._deferred_binds = True
        self._now, self._behind, self._used, self._z_free = now, behind, used, free

    def copy(self) -> Run:
        """Returns an independent run that continues from here. It records no events."""
        assert not self._records, "only runs by themselves are recorded"
        twin = copy(self)
        twin._counts, twin._scatters = self._counts.copy(), self._scatters.copy()
        return twin

    def _record_z(self, part: Part, name: str, start: float, end: float, seconds: float) -> None:
        event = Event("z", part.prefix + name, start, end, seconds, part.micro_batch)
        self._z_events.append(event)

    def _record_path(self, item: OnPath, part: Part, now: float, behind: float) -> None:
        """Adds the events of what has just run on the path."""
        start, behind = now - item.seconds, behind - item.on_z
        for done in item.passes:
            for stream, name, began, ended, busy_s in done.pieces:
                at = start + began
                self._events.append(
                    Event(stream, part.prefix + name, at, start + ended, busy_s, part.micro_batch)
                )
                if stream in self._on_z and self._overlaps:
                    self._pauses.append((at - behind, busy_s))
                    behind += busy_s
            start += done.seconds

    def passed(self) -> Passes:
        computed, exposed, binds = 0.0, defaultdict[str, float](float), self._deferred_binds
        for key, count in self._counts.items():
            for item in self._items[key]:
                if isinstance(item, OnPath):
                    computed += count * item.compute_s
                    # If z's time goes back, a finished sum may become unfinished.
                    binds = binds or item.on_z > item.seconds
                    for axis, seconds in item.waits.items():
                        exposed[axis] += count * seconds
        if self._z_exposed:
            exposed["z"] += self._z_exposed
        events = (*self._events, *map(self._in_real_time, self._z_events)) if self._records else ()
        return Passes(
            self._now, computed, self._backward_from, self._used, self._z_free + self._behind,
            exposed, events, binds,
        )  # fmt: skip

    def _in_real_time(self, event: Event) -> Event:
        start, end = (
            t
            + sum(seconds for at, seconds in self._pauses if at < t - 1e-12 or (at <= t and begins))
            for t, begins in ((event.start_s, True), (event.end_s, False))
        )
        return event._replace(start_s=start, end_s=end)
