"""Says which work overlaps in a pass of a Linear, for each algorithm of its ops.

Over x and y, "sequential" runs one thing after the other. "chunked" cuts the gather before a
product, or the sum after it, into a few chunks, so that one chunk moves while another one is
multiplied. In backward it sums dx while the product of the weight gradient runs, and gathers x
while the product of dx runs. "auto" is the algorithm that was measured to be fastest; here, the one
that is fastest in the model.

Communication is modelled to take nothing from the products that run at the same time. Collectives
on the same wire run one after the other. The collectives over z are not part of these passes: with
overlap the orchestrator issues them, and without it they are counted one after the other.

Sources: csrc/ops/composed/linear_forward.cpp, linear_backward.cpp, chunked.h and chunked.cpp;
docs/tuning.md for "auto".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.events import COMPUTE
from axonn_ext.planner.step.tasks import Collective, Task

_MOST_CHUNKS = 4  # kMaxChunksPerShard of core/schedule/chunk_plan.h
_LEAST_CHUNK_BYTES = {"cuda": 4 << 20, "cpu": 256 << 10}  # those of plan_chunks in chunked.cpp
_REPLACES_DEFAULT = 0.95  # share of the default's time below which "auto" replaces it (tuning.md)
SUM_OF_BLOCKS = "sum of blocks"  # adds the blocks of a gradient that have crossed z


class Piece(NamedTuple):
    """One stream's work in a pass; times count from the beginning of the pass.

    stream   "compute", or the axis of a collective
    busy_s   the seconds for which the stream's wire carries its bytes, or computation runs
    """

    stream: str
    name: str
    start_s: float
    end_s: float
    busy_s: float


class Pass(NamedTuple):
    """A pass of a Linear, or another task of a step, without traffic over z outside the path.

    seconds  from its beginning to its end: compute_s, and the waits of all axes
    waits    axis -> the seconds for which computation waits for it
    busy     axis -> the seconds for which its wire carries its bytes
    pieces   empty if only times were requested
    """

    seconds: float
    compute_s: float
    waits: Mapping[str, float]
    busy: Mapping[str, float]
    pieces: tuple[Piece, ...]

    def busy_s(self, axes: frozenset[str]) -> float:
        """Returns the seconds for which collectives over these axes use their wires."""
        return sum(seconds for axis, seconds in self.busy.items() if axis in axes)


class Unit(NamedTuple):
    """What a step runs between two points at which it may wait for z.

    tasks        one, or dgrad and wgrad
    uses_weight  whether it begins with the use of a weight that is gathered over z
    passes       what runs on the path; between two of them is a collective over z on the path
    over_z       the collectives between the passes
    """

    tasks: tuple[Task, ...]
    uses_weight: bool
    passes: tuple[Pass, ...]
    over_z: tuple[Collective, ...]

    @property
    def seconds(self) -> float:
        """The seconds on the path, without collectives over z."""
        return sum(p.seconds for p in self.passes)

    @property
    def gather(self) -> Collective | None:
        """The gather of the weight over z."""
        return self.tasks[0].gather

    @property
    def scatter(self) -> Collective | None:
        """The reduce-scatter over z that the unit ends with."""
        return self.tasks[-1].scatter


class LinearPasses:
    """The passes of a job's tasks on a machine. records: whether passes have pieces."""

    def __init__(self, job: Job, machine: Machine, costs: Costs, *, records: bool = False) -> None:
        options = job.options
        self._machine, self._costs, self._records = machine, costs, records
        self._algorithm, self._size = options.algorithm, job.grid.as_dict()
        self._apart = job.grid.pipe > 1 and options.pipeline.defers
        self._orchestrated = options.overlap is not None and job.grid.z > 1
        self._saves_input = options.sharded and options.save_gathered
        self._least_chunk_bytes = _LEAST_CHUNK_BYTES[machine.device]
        self._passes: dict[tuple[object, ...], tuple[Pass, ...]] = {}  # of tasks without names

    def units(self, tasks: Sequence[Task]) -> list[Unit]:
        """Returns the tasks in order; dgrad and wgrad are one pass unless they run separately."""
        units, i = [], 0
        while i < len(tasks):
            together = not self._apart and _is(tasks[i], "NN") and i + 1 < len(tasks)
            count = 2 if together and _is(tasks[i + 1], "TN") else 1
            units.append(self._unit(tuple(tasks[i : i + count])))
            i += count
        return units

    def _unit(self, tasks: tuple[Task, ...]) -> Unit:
        first = tasks[0]
        uses_weight = first.gather is not None
        over_z: tuple[Collective, ...] = ()
        if first.matmul is None:
            over_z = tuple(c for c in (*first.before, *first.after) if c.axis == "z")
        else:
            uses_weight = uses_weight or (self._orchestrated and not _is(first, "TN"))
        if self._records:
            return Unit(tasks, uses_weight, self._passes_of(tasks), over_z)
        key = tuple(task[1:] for task in tasks)
        if key not in self._passes:
            self._passes[key] = self._passes_of(tasks)
        return Unit(tasks, uses_weight, self._passes[key], over_z)

    def _passes_of(self, tasks: tuple[Task, ...]) -> tuple[Pass, ...]:
        """Returns what runs on the path for the tasks of a unit."""
        if tasks[0].matmul is None:
            return self._passes_of_other(tasks[0])
        return (self._linear(tasks),)

    def _passes_of_other(self, task: Task) -> tuple[Pass, ...]:
        """Returns what a task other than a Linear's runs, cut at its collectives over z."""
        steps: list[Collective | None] = [*task.before, None, *task.after]  # None: computation
        cuts = [i for i, c in enumerate(steps) if c is not None and c.axis == "z"]
        passes = []
        for start, stop in pairwise((-1, *cuts, len(steps))):
            clock = self._clock()
            for c in steps[start + 1 : stop]:
                if c is None:
                    clock.compute(task.name, self._costs.compute(task))
                else:
                    clock.move(task.name, c)
            passes.append(clock.passed())
        return tuple(passes)

    def _linear(self, tasks: Sequence[Task]) -> Pass:
        if self._algorithm == "sequential" or not any(t.before or t.after for t in tasks):
            return self._one_by_one(tasks, hidden_share=0.0)
        share = self._machine.hidden_share
        # On CPUs of one host, "auto" is "fused" unless something else was measured.
        on_cpus = self._machine.device == "cpu"
        if self._algorithm == "fused" or (self._algorithm == "auto" and on_cpus):
            return self._one_by_one(tasks, hidden_share=share)
        best = self._chunked(tasks)
        if self._algorithm == "chunked":
            return best
        if share:
            fused = self._one_by_one(tasks, hidden_share=share)
            best = min(best, fused, key=lambda way: way.seconds)
        in_sequence = sum(self._costs.compute(task) for task in tasks) + sum(
            self._costs.collective(c) for task in tasks for c in (*task.before, *task.after)
        )
        if best.seconds < _REPLACES_DEFAULT * in_sequence:
            return best
        return self._one_by_one(tasks, hidden_share=0.0)

    def _one_by_one(self, tasks: Sequence[Task], *, hidden_share: float) -> Pass:
        """Runs "sequential"; or "fused", which hides up to a share of what each task moves."""
        clock = self._clock()
        for task in tasks:
            compute_s, shown = self._costs.compute(task), 1.0
            if hidden_share and (task.before or task.after):
                moved_s = sum(self._costs.collective(c) for c in (*task.before, *task.after))
                shown = 1 - hidden_share * min(compute_s, moved_s) / moved_s if moved_s else 1.0
            for c in task.before:
                clock.move(task.name, c, shown=shown)
            clock.compute(task.name, compute_s)
            for c in task.after:
                clock.move(task.name, c, shown=shown)
        return clock.passed()

    def _clock(self) -> _Clock:
        return _Clock(self._costs, records=self._records)

    # --- "chunked" -------------------------------------------------------------------------------

    def _chunked(self, tasks: Sequence[Task]) -> Pass:
        clock = self._clock()
        if len(tasks) == 2 and tasks[0].after:
            self._overlapped_backward(clock, *tasks)
            return clock.passed()
        for task in tasks:
            feeds = _is(task, "NT") and task.before and not task.after and not self._saves_input
            if feeds:
                self._feed(clock, task)
                continue
            for c in task.before:
                clock.move(task.name, c)
            if task.after:
                self._drain(clock, task)
            else:
                clock.compute(task.name, self._costs.compute(task))
        return clock.passed()

    def _overlapped_backward(self, clock: _Clock, dgrad: Task, wgrad: Task) -> None:
        """Runs overlapped_backward of linear_backward.cpp: dy, and then x, are gathered at once."""
        dy = [(c, clock.start(dgrad.name, c)) for c in dgrad.before]
        x = [(c, clock.start(wgrad.name, c)) for c in wgrad.before]
        for c, end in dy:
            clock.wait(c.axis, end)
        clock.compute(dgrad.name, self._costs.compute(dgrad))
        dx = [(c, clock.start(dgrad.name, c)) for c in dgrad.after]
        for c, end in x:
            clock.wait(c.axis, end)
        clock.compute(wgrad.name, self._costs.compute(wgrad._replace(touched_bytes=0)))
        for c, end in dx:
            clock.wait(c.axis, end)
        added = wgrad._replace(matmul=None)
        clock.compute(f"{wgrad.name}: {SUM_OF_BLOCKS}", self._costs.compute(added))

    def _feed(self, clock: _Clock, task: Task) -> None:
        """Gathers the next chunk while one is multiplied."""
        (c,) = task.before
        number, chunk, product_s = self._cut(task, c)
        following = clock.start(task.name, chunk)
        for i in range(number):
            current = following
            if i + 1 < number:
                following = clock.start(task.name, chunk)
            clock.wait(c.axis, current)
            clock.compute(task.name, product_s)

    def _drain(self, clock: _Clock, task: Task) -> None:
        """Sums the previous chunk while one is multiplied."""
        (c,) = task.after
        number, chunk, product_s = self._cut(task, c)
        ends = []
        for _ in range(number):
            clock.compute(task.name, product_s)
            ends.append(clock.start(task.name, chunk))
        for end in ends:
            clock.wait(c.axis, end)

    def _cut(self, task: Task, c: Collective) -> tuple[int, Collective, float]:
        """Returns the number of chunks, and one chunk's collective and product seconds."""
        assert task.matmul is not None
        g = self._size[c.axis]
        # Chunks are cut from the part of one rank; for an all-reduce, from the whole.
        part_bytes = c.num_bytes * g // (2 * (g - 1)) if c.kind == "all_reduce" else (
            c.num_bytes // (g - 1)
        )  # fmt: skip
        number = max(1, min(_MOST_CHUNKS, part_bytes // self._least_chunk_bytes, task.matmul.m))
        rows = -(-task.matmul.m // number)
        product = task._replace(matmul=task.matmul._replace(m=rows))
        chunk = c._replace(num_bytes=-(-c.num_bytes // number))
        return number, chunk, self._costs.compute(product)


class _Clock:
    """The time of a pass. Each wire carries one collective at a time, in the order of issue."""

    def __init__(self, costs: Costs, *, records: bool) -> None:
        self._costs, self._records = costs, records
        self._now = self._computed = 0.0
        self._free: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._pieces: list[Piece] = []

    def compute(self, name: str, seconds: float) -> None:
        if self._records and seconds:
            self._add(COMPUTE, name, self._now, seconds, seconds)
        self._now += seconds
        self._computed += seconds

    def start(self, name: str, c: Collective, *, shown: float = 1.0) -> float:
        """Starts a collective; returns when it is done. shown: the share that takes time."""
        wire, seconds = self._costs.wires[c.axis], self._costs.collective(c)
        start = max(self._now, self._free.get(wire, 0.0))
        self._free[wire] = end = start + shown * seconds
        self._busy[c.axis] = self._busy.get(c.axis, 0.0) + seconds
        if self._records:
            self._add(c.axis, f"{name}: {c.kind}", start, shown * seconds, seconds)
        return end

    def wait(self, axis: str, end: float) -> None:
        if end > self._now:
            self._waits[axis] = self._waits.get(axis, 0.0) + end - self._now
            self._now = end

    def move(self, name: str, c: Collective, *, shown: float = 1.0) -> None:
        """Starts a collective and waits for it."""
        self.wait(c.axis, self.start(name, c, shown=shown))

    def passed(self) -> Pass:
        return Pass(self._now, self._computed, self._waits, self._busy, tuple(self._pieces))

    def _add(self, stream: str, name: str, start: float, seconds: float, busy_s: float) -> None:
        self._pieces.append(Piece(stream, name, start, start + seconds, busy_s))


def _is(task: Task, layout: str) -> bool:
    """Whether the task is a Linear's product in forward (NT), dgrad (NN) or wgrad (TN)."""
    return task.matmul is not None and task.matmul.layout == layout
