"""Simulates one training step on one rank as a schedule of discrete events.

One stream computes, and each axis has a stream of its own for communication, which runs the
collectives of the axis in the order in which they are issued. With overlap, this is the order in
which `axonn_ext.overlap` issues them. A collective is on the path if the compute stream waits until
it is done: those over x and y and those of the loss are, and without overlap all are. Several axes
may share a wire (the links of a GPU, or of a node). A collective that is not on the path then
pauses while a collective on the path uses its wire.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from axonn_ext.planner.costs import Costs, TaskCost
from axonn_ext.planner.events import COMPUTE, Event, Timeline
from axonn_ext.planner.held import block_is_held, held_share, table_is_held
from axonn_ext.planner.job import Job
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.step.tasks import Collective, Program, Task
from axonn_ext.planner.updates import optimizer_step
from axonn_ext.spec.grid import COMMUNICATING

_MOST_UNDER_WAY = 2  # buckets of ZeRO whose sums are under way at a time, as in axonn_ext.zero


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


class _Step(NamedTuple):
    """A task of some layer and micro-batch.

    share: the part of the task's weight that is not held gathered, and so must be gathered.
    """

    task: Task
    cost: TaskCost
    name: str
    micro_batch: int
    share: float


_BACKWARD = _Step(Task("backward begins"), TaskCost(0.0, (), 0.0, 0.0, 0.0), "", 0, 0.0)


class Simulation:
    """Runs a program with any number of layers and micro-batches."""

    def __init__(self, job: Job, program: Program, machine: Machine, *, records: bool) -> None:
        self._program, self._records = program, records
        self._overlap = job.options.overlap
        costs = Costs(machine, job.grid, job.options.dtype)
        self._beside_z, self._beside_data = costs.beside("z"), costs.beside("data")
        self._parts = [
            [(task, costs.task(task)) for task in tasks] for tasks, _ in program.micro_batch()
        ]
        self._hidden_share = machine.hidden_share
        self._sums = [(c, costs.collective(c)) for c in program.gradient_sums]
        self._sums_in_each = [(c, costs.collective(c)) for c in program.sums_in_each]
        self._norms = [(c, costs.collective(c)) for c in program.norm_sums]
        self._optimizer = optimizer_step(
            program.optimizer, costs, overlaps=self._overlap is not None
        )
        self._held_share = held_share(job, program.num_layers)
        self._holds_table = table_is_held(job)
        # If a block's weights can all be held at once, backward does not gather again what
        # recomputation has gathered.
        self._regathers = not block_is_held(job)

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
        self._free = dict.fromkeys((COMPUTE, *COMMUNICATING), 0.0)
        self._now, self._computed, self._backward_from = 0.0, 0.0, 0.0
        # The axis z has its own time, which stands still while the path uses z's wire. `_behind` is
        # how far z's time is behind real time.
        self._behind = 0.0
        self._pauses: list[tuple[float, float]] = []  # when z's time stood still, and how long
        self._used = 0.0  # the seconds in which other axes used the data axis' wire
        self._exposed: defaultdict[str, float] = defaultdict(float)
        self._events: list[Event] = []
        self._scatters: deque[float] = deque()
        steps = [s for part in range(num_parts) for s in self._micro_batch(num_layers, part)]
        self._to_gather = deque(step for step in steps if step.task.gather is not None)
        self._gathered: deque[float] = deque()  # the ends of gathers whose weights are not yet used
        for step in steps:
            self._run_step(step)
        z_free = self._free["z"] + self._behind
        self._events = [self._in_real_time(event) for event in self._events]
        return Passes(
            self._now, self._computed, self._backward_from, self._used, z_free, dict(self._exposed)
        )

    def finish(self, passes: Passes) -> Timeline:
        """Adds the sums of gradients that backward does not hide, the norm and the optimizer.

        What the sums of earlier micro-batches (zero=2) delay is added here, too, as one piece.
        """
        self._free = dict.fromkeys(self._free, 0.0) | {"z": passes.z_free_s}
        self._now, self._computed = passes.end_s, passes.compute_s
        self._exposed = defaultdict(float, passes.exposed_s)
        self._sum_gradients(passes)
        for axis in COMMUNICATING:
            self._wait_for(axis, self._free[axis])
        for c, seconds in self._norms:
            self._wait_for(c.axis, self._issue(c, seconds, self._now))
        self._update()
        return Timeline(
            self._now, self._computed, dict(self._exposed), self._optimizer.update_s,
            tuple(self._events),
        )  # fmt: skip

    # --- The parts of a step ---------------------------------------------------------------------

    def _micro_batch(self, num_layers: int, index: int) -> Iterator[_Step]:
        first, block, last, last_back, block_back, again_back, first_back = self._parts
        recomputation = self._program.recomputation
        # When a pass ends and the next one begins, the weights of `held` layers are still gathered.
        held = self._held_share * num_layers
        of_ends = 1.0 if index == 0 or self._held_share < 1 else 0.0

        def steps(
            tasks: Sequence[tuple[Task, TaskCost]], layer: int | None, share: float
        ) -> Iterator[_Step]:
            prefix = "" if layer is None else f"{layer}."
            for task, cost in tasks:
                # A block's dgrads need not gather the weights that its recomputation has gathered.
                spared = tasks is again_back and not task.is_forward and not self._regathers
                yield _Step(task, cost, prefix + task.name, index, 0.0 if spared else share)

        yield from steps(first, None, of_ends)
        for layer in range(num_layers):
            yield from steps(block, layer, _share(layer + 1 - held) if index else 1.0)
        yield from steps(last, None, 0.0 if self._holds_table else of_ends)
        yield _BACKWARD
        yield from steps(last_back, None, 0.0 if self._holds_table or held else 1.0)
        for layer in reversed(range(num_layers)):
            back = again_back if recomputation.has_block(layer) else block_back
            yield from steps(back, layer, _share(num_layers - held - layer))
        yield from steps(first_back, None, 1.0)

    def _sum_gradients(self, passes: Passes) -> None:
        """Adds the sums of gradients after backward.

        With overlap, the last micro-batch's backward fills buckets of weight gradients, which cross
        the data axis whenever no other axis uses its wire. The gradients that cross other axes,
        those of biases and norms, are small and come last.
        """
        sums, others = [*self._sums_in_each, *self._sums], self._program.num_micro_batches - 1
        if self._overlap is None:
            for c, seconds in self._sums_in_each if others else ():
                self._wait_for(c.axis, self._issue(c, others * seconds, self._now))
            for c, seconds in sums:
                self._wait_for(c.axis, self._issue(c, seconds, self._now))
            return
        buckets = [sum for sum in sums if sum[0].axis == "data"]
        began, backward = passes.backward_s, self._now - passes.backward_s
        left = max(0.0, 1 - passes.used_s / backward) if backward else 1.0  # the wire's free share
        free = 0.0  # counts only the seconds since backward began in which the wire is free
        for i, (c, seconds) in enumerate(buckets):
            start = max(free, left * backward * (i + 1) / len(buckets))
            free = start + seconds
            self._beside_backward(c, start, free, left=left, began=began)
        for c, seconds in sums:
            if c.axis != "data":
                self._issue(c, seconds, self._now)
        if others and self._sums_in_each:
            forward = left * (passes.end_s / (others + 1) - backward)
            self._delay_others(others, free - left * backward, forward)

    def _delay_others(self, others: int, late: float, forward: float) -> None:
        """Adds what the sums of all micro-batches but the last one delay, with overlap.

        late: how long after backward the sums of a micro-batch end. At most _MOST_UNDER_WAY buckets
        go on beside the next forward pass, in which the wire is free for so many seconds
        (`forward`); the all-reduces over other axes before them are waited for.
        """
        slowest = max(seconds for c, seconds in self._sums_in_each if c.axis == "data")
        hidden = max(0.0, min(_MOST_UNDER_WAY * slowest, forward))
        delays = {"data": max(0.0, late - hidden)}
        for c, seconds in self._sums_in_each:
            if c.axis != "data":
                delays[c.axis] = delays.get(c.axis, 0.0) + seconds
        for axis, seconds in delays.items():
            self._free[axis] += others * seconds

    def _update(self) -> None:
        """Adds the optimizer, and the all-gathers of parameters that it does not hide."""
        step, start = self._optimizer, self._now
        self._compute("optimizer", step.update_s)
        for began, ended in step.gathers:
            self._free["data"] = start + ended
            self._record("data", "parameters: all_gather", start + began, start + ended)
        self._wait_for("data", start + step.seconds)

    def _beside_backward(
        self, c: Collective, start: float, end: float, *, left: float, began: float
    ) -> None:
        """Runs a collective from `start` to `end` on the data axis.

        `start` and `end` count only seconds in which the wire is free. These are a share (`left`)
        of the backward pass, which began at `began`, and all time after it.
        """
        whole = left * (self._now - began)

        def real(seconds: float) -> float:
            return began + seconds / left if seconds < whole else self._now + seconds - whole

        self._free["data"] = real(end)
        self._record("data", f"{c.what}: {c.kind}", real(start), real(end))

    # --- One task --------------------------------------------------------------------------------

    def _run_step(self, step: _Step) -> None:
        if step is _BACKWARD:
            self._backward_from, self._used = self._now, 0.0
            return
        self._index = step.micro_batch
        if step.task.gather is not None:
            self._use_weight()
        self._on_path(step)
        if step.task.scatter is not None:
            self._scatter(step)

    def _on_path(self, step: _Step) -> None:
        """Runs the collectives before a task, its computation and the collectives after it.

        If a fused op hides a part of the collectives, only the rest takes time.
        """
        task, cost = step.task, step.cost
        moved = sum(seconds for _, seconds in cost.path)
        shown = 1 - cost.hidden / moved if moved else 1.0
        before = len(task.before)
        for i, (axis, seconds) in enumerate(cost.path):
            if i == before:
                self._compute(step.name, cost.compute)
            c = (*task.before, *task.after)[i]
            behind = self._behind if axis == "z" else 0.0
            start = max(self._now - behind, self._free[axis])
            if axis in self._beside_z:
                self._pause(seconds, start)
            if axis in self._beside_data:
                self._used += seconds
            self._free[axis] = start + seconds * shown
            self._record(axis, f"{step.name}: {c.kind}", start, self._free[axis])
            self._wait_for(axis, self._free[axis] + behind)
        if len(cost.path) <= before:
            self._compute(step.name, cost.compute)

    def _use_weight(self) -> None:
        """Starts the gathers for this use of a weight and for the next ones; waits for this use's.

        The next ones are the `prefetch` uses that follow. `axonn_ext.overlap` does the same. So
        these gathers are issued before the reduce-scatter of the gradient that this use leads to.
        """
        prefetch = self._overlap.prefetch if self._overlap is not None else 0
        while self._to_gather and len(self._gathered) <= prefetch:
            self._gathered.append(self._gather(self._to_gather.popleft()))
        self._wait_for("z", self._gathered.popleft() + self._behind)

    def _gather(self, step: _Step) -> float:
        share = step.share if self._overlap is not None else 1.0
        if not share:
            return 0.0  # the weight is still held
        return self._beside(f"{step.name}: all_gather", step.cost.gather * share, step.cost)

    def _scatter(self, step: _Step) -> None:
        end = self._beside(f"{step.name}: reduce_scatter", step.cost.scatter, step.cost)
        if self._overlap is None:
            self._wait_for("z", end + self._behind)
            return
        self._scatters.append(end)
        while len(self._scatters) > self._overlap.deferred:
            self._wait_for("z", self._scatters.popleft() + self._behind)

    def _beside(self, name: str, seconds: float, cost: TaskCost) -> float:
        """Queues a collective over z; returns when it is done, in z's time."""
        seconds *= self._shown(cost)
        if "z" in self._beside_data:
            self._used += seconds
        start = max(self._now - self._behind, self._free["z"])
        self._free["z"] = start + seconds
        self._record("z", name, start, start + seconds)
        return start + seconds

    def _pause(self, seconds: float, at: float) -> None:
        """Lets z's time stand still while the path uses z's wire."""
        if self._overlap is not None:
            if self._records:
                self._pauses.append((at - self._behind, seconds))
            self._behind += seconds

    def _in_real_time(self, event: Event) -> Event:
        if event.stream != "z":
            return event
        start, end = (
            t
            + sum(seconds for at, seconds in self._pauses if at < t - 1e-12 or (at <= t and begins))
            for t, begins in ((event.start_s, True), (event.end_s, False))
        )
        return event._replace(start_s=start, end_s=end)

    def _shown(self, cost: TaskCost) -> float:
        """Returns the share of a collective over z that a fused op does not hide.

        An op can hide them only without overlap, because then the op itself issues them.
        """
        moved = cost.gather + cost.scatter
        if self._overlap is not None or not moved or cost.path:
            return 1.0
        return 1 - self._hidden_share * min(cost.compute, moved) / moved

    # --- Streams ---------------------------------------------------------------------------------

    def _compute(self, name: str, seconds: float) -> None:
        start = self._now
        self._now += seconds
        self._computed += seconds
        self._free[COMPUTE] = self._now
        if seconds:
            self._record(COMPUTE, name, start, self._now)

    def _issue(self, c: Collective, seconds: float, at: float) -> float:
        start = max(at, self._free[c.axis])
        self._free[c.axis] = start + seconds
        self._record(c.axis, f"{c.what}: {c.kind}", start, start + seconds)
        return start + seconds

    def _wait_for(self, axis: str, end: float) -> None:
        if end > self._now:
            self._exposed[axis] += end - self._now
            self._now = end

    def _record(self, stream: str, name: str, start: float, end: float) -> None:
        if self._records:
            self._events.append(Event(stream, name, start, end, self._index))


def _share(layers: float) -> float:
    """Returns the part of one layer that a fractional number of layers covers, from 0 to 1."""
    return min(1.0, max(0.0, layers))
