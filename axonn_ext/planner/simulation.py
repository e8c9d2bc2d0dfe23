"""Simulates the forward and backward passes of a step on one rank.

What runs on the path, products and what linear_passes.py runs with them, follows one after the
other. Beside it run the collectives over z, in the order in which they are issued. With overlap,
this is the order in which `axonn_ext.overlap` issues them; without it, the path waits for each.
Several axes may share a wire (the links of a GPU, or of a node). A collective over z then pauses
while the path uses its wire.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from axonn_ext.planner.events import Event
from axonn_ext.planner.held import (
    held_after_recomputation,
    held_share,
    table_bytes,
    table_is_held,
)
from axonn_ext.planner.job import Job
from axonn_ext.planner.prepared_step import Item, OnPath, PointOfZ, PreparedStep, WireAxes
from axonn_ext.planner.step.program import has_table


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


class _Part(NamedTuple):
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


class Simulation:
    """Runs a program with any number of layers and micro-batches."""

    def __init__(self, job: Job, step: PreparedStep, *, records: bool) -> None:
        self._job, self._program, self._records = job, step.program, records
        self._overlap = job.options.overlap
        self._budget = 0 if self._overlap is None else self._overlap.gathered_bytes
        self._in_stages, self._axes = job.grid.pipe > 1, step.axes
        self._items = step.items
        self._held = held_after_recomputation(job)
        layers, has_tables = step.program.num_layers, has_table(step.program)
        self._held_share = held_share(job, layers, has_table=has_tables)
        self._holds_table = table_is_held(job)

    def run_all_layers(self, num_parts: int) -> Passes:
        """Simulates all passes of a step with that many micro-batches."""
        # Where some of several blocks are recomputed, so many blocks are what repeats itself.
        layers, period = self._program.num_layers, self._program.recomputation.of
        few = 4 + (layers - 4) % period
        some = few + period * -(-4 // period)
        if layers <= some:
            return self.run(layers, num_parts)
        low, high = self.run(few, num_parts), self.run(some, num_parts)
        return low.extended(high, (layers - few) / (some - few))

    def run(self, num_layers: int, num_parts: int) -> Passes:
        """Simulates all passes of a step with that many layers and micro-batches."""
        parts = [p for index in range(num_parts) for p in self._micro_batch(num_layers, index)]
        run = _Run(self._axes, overlaps=self._overlap is not None, records=self._records)
        uses = self._uses(parts)
        for part in parts:
            if part.is_backward_begun:
                run.begin_backward()
            for item in part.items:
                if isinstance(item, OnPath):
                    run.path(item)
                    if self._records:
                        run.record_path(item, part)
                elif item.kind == "use":
                    uses.use(run)
                elif item.kind == "scatter":
                    run.scatter(item, part, self._overlap.deferred if self._overlap else 0)
                else:
                    run.wait_for_z(run.over_z(item.name, item.seconds, part))
        return run.passed()

    # --- The parts of a step ---------------------------------------------------------------------

    def _micro_batch(self, num_layers: int, index: int) -> Iterator[_Part]:
        first, block, last, last_back, block_back, again_back, first_back = self._items
        recomputation = self._program.recomputation
        # When a pass ends and the next one begins, the weights of `held` layers are still gathered.
        held = self._held_share * num_layers
        of_ends = 1.0 if index == 0 or self._held_share < 1 else 0.0
        number = 2 * index
        yield _Part(first, "", index, of_ends, number)
        for layer in range(num_layers):
            share = _share(layer + 1 - held) if index else 1.0
            yield _Part(block, f"{layer}.", index, share, number)
        yield _Part(last, "", index, 0.0 if self._holds_table else of_ends, number)
        number += 1
        # The head's weight is used again at once. A weight that exceeds the budget is given up.
        of_head = 1.0 if table_bytes(self._job) > self._budget else 0.0
        yield _Part(last_back, "", index, of_head, number, is_backward_begun=True)
        for layer in reversed(range(num_layers)):
            back = again_back if recomputation.has_block(layer) else block_back
            yield _Part(back, f"{layer}.", index, _share(num_layers - held - layer), number)
        yield _Part(first_back, "", index, 1.0, number)

    def _uses(self, parts: Sequence[_Part]) -> _Uses:
        """Returns all uses of weights, in their order."""
        overlap = self._overlap
        uses = _Uses(0 if overlap is None else overlap.prefetch, self._budget)
        for part in parts:
            for item in part.items:
                if isinstance(item, PointOfZ) and item.kind == "use":
                    number = item.after_recomputation
                    spared = number is not None and self._held[number]
                    share = 1.0 if overlap is None else 0.0 if spared else part.share
                    uses.add(item, share, part, in_pass=part.number if self._in_stages else 0)
        return uses


class _Uses:
    """The uses of weights of a run, and which of them are gathered ahead.

    A use starts the gathers of the weights that are used next, as many as `prefetch` says, as long
    as they fit within the budget together with the one in use. What is held beside these gives way,
    since it is needed later. In a pipeline no pass knows what the next one uses.
    """

    def __init__(self, prefetch: int, budget: float) -> None:
        self._prefetch, self._budget = prefetch, budget
        self._all: list[tuple[PointOfZ, float, _Part, int]] = []
        self._sums = [0.0]  # of bytes, up to each use
        self._ends: list[float] = []  # of gathers, in z's time
        self._now = 0  # the number of the next use

    def add(self, item: PointOfZ, share: float, part: _Part, *, in_pass: int) -> None:
        # Two uses in a row of one weight, as of the head's, take its room once.
        again = bool(self._all) and self._all[-1][0].weight == item.weight
        self._sums.append(self._sums[-1] + (0.0 if again else item.num_bytes))
        self._all.append((item, share, part, in_pass))

    def use(self, run: _Run) -> None:
        """Starts the gathers for the next use and for those that follow; waits for the former."""
        number, ends = self._now, self._ends
        self._now += 1
        if len(ends) == number:
            self._gather(run)
        in_pass, base = self._all[number][3], self._sums[number]
        while (
            len(ends) < len(self._all)
            and len(ends) - number <= self._prefetch
            and self._sums[len(ends) + 1] - base <= self._budget
            and self._all[len(ends)][3] == in_pass
        ):
            self._gather(run)
        run.wait_for_z(ends[number])

    def _gather(self, run: _Run) -> None:
        item, share, part, _ = self._all[len(self._ends)]
        seconds = item.seconds * share
        self._ends.append(run.over_z(item.name, seconds, part) if seconds else 0.0)


class _Run:
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
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._paths: dict[int, OnPath] = {}
        self._scatters: deque[float] = deque()
        self._pauses: list[tuple[float, float]] = []  # when z's time stood still, and how long
        self._events: list[Event] = []
        self._z_events: list[Event] = []

    def path(self, item: OnPath) -> None:
        self._now += item.seconds
        self._behind += item.on_z
        self._used += item.on_data
        key = id(item)
        self._counts[key] += 1
        self._paths[key] = item

    def begin_backward(self) -> None:
        self._backward_from, self._used = self._now, 0.0

    def over_z(self, name: str, seconds: float, part: _Part) -> float:
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

    def scatter(self, item: PointOfZ, part: _Part, deferred: int) -> None:
        self._scatters.append(self.over_z(item.name, item.seconds, part))
        while len(self._scatters) > deferred:
            self.wait_for_z(self._scatters.popleft())

    def record_path(self, item: OnPath, part: _Part) -> None:
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
            item = self._paths[key]
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


def _share(layers: float) -> float:
    """Returns the part of one layer that a fractional number of layers covers, from 0 to 1."""
    return min(1.0, max(0.0, layers))
