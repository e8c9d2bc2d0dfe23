"""The clock of one rank: what it runs, and the weights that it gathers ahead (simulation.py)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from copy import copy
from typing import NamedTuple

from axonn_ext.planner.events import Event
from axonn_ext.planner.prepared_step import Item, OnPath, PointOfZ, WireAxes


class Passes(NamedTuple):
    """The state after all forward and backward passes.

    backward_s  the time at which the last micro-batch's backward began
    used_s      the seconds since backward_s in which other axes have used the data axis' wire
    z_free_s    the time at which the last reduce-scatter over z is done
    """

    end_s: float
    compute_s: float
    backward_s: float
    used_s: float
    z_free_s: float
    exposed_s: Mapping[str, float]
    events: tuple[Event, ...] = ()

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
        )  # fmt: skip

    def less(self, longer: Passes) -> Passes:
        """Returns how much longer the other passes take, which begin like these."""
        exposed = {
            axis: max(0.0, seconds - self.exposed_s.get(axis, 0.0))
            for axis, seconds in longer.exposed_s.items()
        }
        compute_s = longer.compute_s - self.compute_s
        return Passes(compute_s + sum(exposed.values()), compute_s, 0.0, 0.0, 0.0, exposed)


class Part(NamedTuple):
    """One part of a micro-batch, as it runs in a layer.

    is_backward_begun  whether backward begins with it
    share              the part of its weights that is not held gathered, and so must be gathered
    number             that of the pass that it belongs to, which counts only in a pipeline
    """

    items: Sequence[Item]
    prefix: str
    micro_batch: int
    share: float
    number: int
    is_backward_begun: bool = False


class Uses:
    """The uses of weights of a run, and which of them are gathered ahead.

    A use starts the gathers of the weights that are used next, as many as `prefetch` says, as long
    as they fit within the budget together with the one in use. What is held beside these gives way,
    since it is needed later. In a pipeline no pass knows what the next one uses.
    """

    def __init__(self, prefetch: int, budget: float) -> None:
        self.prefetch, self._budget = prefetch, budget
        self.count = 0
        self._all: list[tuple[PointOfZ, float, Part, int]] = []
        self._sums = [0.0]  # of bytes, up to each use
        self._ends: list[float] = []  # of gathers, in z's time
        self._now = 0  # the number of the next use

    def add(self, item: PointOfZ, share: float, part: Part, *, in_pass: int) -> None:
        # Two uses in a row of one weight, as of the head's, take its room once.
        again = bool(self._all) and self._all[-1][0].weight == item.weight
        self._sums.append(self._sums[-1] + (0.0 if again else item.num_bytes))
        self._all.append((item, share, part, in_pass))
        self.count += 1

    def first(self, count: int) -> Uses:
        """Returns a copy that goes on from the same use, and ends after the first `count` uses."""
        twin = copy(self)
        twin.count, twin._ends = count, self._ends.copy()
        return twin

    def use(self, run: Run) -> None:
        """Starts the gathers for the next use and for those that follow; waits for the former."""
        number, base, in_pass = self._now, self._sums[self._now], self._all[self._now][3]
        self._now += 1
        for ahead in range(len(self._ends), min(self.count, number + self.prefetch + 1)):
            item, share, part, its_pass = self._all[ahead]
            fits = self._sums[ahead + 1] - base <= self._budget and its_pass == in_pass
            if ahead > number and not fits:
                break
            seconds = item.seconds * share
            self._ends.append(run.over_z(item.name, seconds, part) if seconds else 0.0)
        run.wait_for_z(self._ends[number])


class Run:
    """The clock of a run: the path's time, and the time of the axis z.

    z's time stands still while the path uses z's wire. `_behind` is how far it is behind real time.
    """

    def __init__(self, axes: WireAxes, *, overlaps: bool, records: bool) -> None:
        self._overlaps, self._on_z, self._records = overlaps, axes.on_z, records
        self._z_uses_data = "z" in axes.on_data
        self._now = self._backward_from = self._computed = 0.0
        self._z_free = self._behind = 0.0
        self._used = 0.0  # the seconds in which other axes used the data axis' wire
        self._z_exposed = 0.0
        self._counts: Counter[int] = Counter()  # of parts with the same items, by their id
        self._items: dict[int, Sequence[Item]] = {}
        self._scatters: deque[float] = deque()
        self._pauses: list[tuple[float, float]] = []  # when z's time stood still, and how long
        self._events: list[Event] = []
        self._z_events: list[Event] = []

    def path(self, item: OnPath) -> None:
        self._now += item.seconds
        self._behind += item.on_z
        self._used += item.on_data

    def begin(self, part: Part) -> None:
        if part.is_backward_begun:
            self._backward_from, self._used = self._now, 0.0
        key = id(part.items)
        self._counts[key] += 1
        self._items[key] = part.items

    def copy(self) -> Run:
        """Returns a run that goes on from here by itself. Events are not recorded then."""
        assert not self._records, "only runs by themselves are recorded"
        twin = copy(self)
        twin._counts, twin._scatters = self._counts.copy(), self._scatters.copy()
        return twin

    def over_z(self, name: str, seconds: float, part: Part) -> float:
        """Queues a collective over z; returns when it is done, in z's time."""
        if self._z_uses_data:
            self._used += seconds
        start = max(self._now - self._behind, self._z_free)
        self._z_free = end = start + seconds
        if self._records:
            event = Event("z", part.prefix + name, start, end, seconds, part.micro_batch)
            self._z_events.append(event)
        return end

    def wait_for_z(self, end: float) -> None:
        late = end + self._behind - self._now
        if late > 0:
            self._z_exposed += late
            self._now += late

    def scatter(self, item: PointOfZ, part: Part, deferred: int) -> None:
        self._scatters.append(self.over_z(item.name, item.seconds, part))
        while len(self._scatters) > deferred:
            self.wait_for_z(self._scatters.popleft())

    def record_path(self, item: OnPath, part: Part) -> None:
        """Adds the events of what has just run on the path."""
        start, behind = self._now - item.seconds, self._behind - item.on_z
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
        computed, exposed = 0.0, defaultdict[str, float](float)
        for key, count in self._counts.items():
            for item in self._items[key]:
                if isinstance(item, OnPath):
                    computed += count * item.compute_s
                    for axis, seconds in item.waits.items():
                        exposed[axis] += count * seconds
        if self._z_exposed:
            exposed["z"] += self._z_exposed
        events = (*self._events, *map(self._in_real_time, self._z_events)) if self._records else ()
        return Passes(
            self._now, computed, self._backward_from, self._used, self._z_free + self._behind,
            exposed, events,
        )  # fmt: skip

    def _in_real_time(self, event: Event) -> Event:
        start, end = (
            t
            + sum(seconds for at, seconds in self._pauses if at < t - 1e-12 or (at <= t and begins))
            for t, begins in ((event.start_s, True), (event.end_s, False))
        )
        return event._replace(start_s=start, end_s=end)
