"""Says what runs beside what in a pass of a Linear, for each algorithm of its ops.

Over x and y, "sequential" runs one thing after the other. "chunked" cuts what is gathered in front
of a product, or summed behind it, into a few chunks, so that one chunk moves while another one is
multiplied. In backward it sums dx while the product of the weight gradient runs, and gathers x
while the product of dx runs. "auto" is what was measured to be fastest; here it is what is modelled
to be.

What moves is modelled to take nothing from the products beside it. Collectives on the same wire
run one after the other. The collectives over z are not part of these passes: with overlap the
orchestrator issues them, and without it they are counted one after the other.

Sources: csrc/ops/composed/linear_forward.cpp, linear_backward.cpp, chunked.h and chunked.cpp;
docs/tuning.md for "auto".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from axonn_ext.planner.costs import Costs
from axonn_ext.planner.events import COMPUTE
from axonn_ext.planner.job import Job
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.step.tasks import Collective, Task

_MOST_CHUNKS = 4  # kMaxChunksPerShard of core/schedule/chunk_plan.h
_LEAST_CHUNK_BYTES = {"cuda": 4 << 20, "cpu": 256 << 10}  # those of plan_chunks in chunked.cpp
_REPLACES_DEFAULT = 0.95  # of the default's time: "auto" replaces it only for less (docs/tuning.md)
SUM_OF_BLOCKS = "sum of blocks"  # what adds the blocks of a gradient that have crossed z


class Piece(NamedTuple):
    """What one stream does in a pass; times count from the beginning of the pass.

    stream   "compute", or the axis of a collective
    busy_s   the seconds in which the stream's wire carries its bytes, or computation runs
    """

    stream: str
    name: str
    start_s: float
    end_s: float
    busy_s: float


class Pass(NamedTuple):
    """A pass of a Linear, or another task of a step, without what it moves over z beside the path.

    seconds  from its beginning to its end: compute_s, and the waits of all axes
    waits    axis -> the seconds in which computation waits for it
    """

    seconds: float
    compute_s: float
    waits: dict[str, float]
    pieces: tuple[Piece, ...]

    def busy_s(self, axes: frozenset[str]) -> float:
        """Returns the seconds in which collectives over these axes use their wires."""
        return sum(piece.busy_s for piece in self.pieces if piece.stream in axes)


class Unit(NamedTuple):
    """What a step runs between two points at which it may wait for z.

    name, last_name  of the first and the last of its tasks, which are often one
    uses_weight  whether it begins with the use of a weight that is gathered over z
    scatter      the reduce-scatter over z that it ends with
    passes       what runs on the path. Between two of them is a collective over z on the path
    over_z       the collectives between the passes
    """

    name: str
    last_name: str
    uses_weight: bool
    gather: Collective | None
    scatter: Collective | None
    passes: tuple[Pass, ...]
    over_z: tuple[Collective, ...]

    @property
    def seconds(self) -> float:
        """The seconds on the path, without collectives over z."""
        return sum(p.seconds for p in self.passes)

    @property
    def share_of_weight_gradient(self) -> float:
        """The share of its computation that is the product of a weight's gradient."""
        computed = [p for part in self.passes for p in part.pieces if p.stream == COMPUTE]
        if not computed:
            return 0.0
        of_weight = sum(p.busy_s for p in computed if "wgrad" in p.name)
        return of_weight / sum(p.busy_s for p in computed)


class LinearPasses:
    """The passes of a job's tasks on a machine."""

    def __init__(self, job: Job, machine: Machine, costs: Costs) -> None:
        options = job.options
        self._job, self._machine, self._costs = job, machine, costs
        self._algorithm, self._size = options.algorithm, job.grid.as_dict()
        self._apart = job.grid.pipe > 1 and options.pipeline.defers
        self._saves_input = options.sharded and options.save_gathered
        self._least_chunk_bytes = _LEAST_CHUNK_BYTES[machine.device]

    def units(self, tasks: Sequence[Task]) -> list[Unit]:
        """Returns the tasks in their order; dgrad and wgrad are one pass unless they run apart."""
        units, i = [], 0
        while i < len(tasks):
            together = not self._apart and _is(tasks[i], "NN") and i + 1 < len(tasks)
            count = 2 if together and _is(tasks[i + 1], "TN") else 1
            units.append(self._unit(tasks[i : i + count]))
            i += count
        return units

    def _unit(self, tasks: Sequence[Task]) -> Unit:
        first, last = tasks[0], tasks[-1]
        in_linear = _is(first, "NT") or _is(first, "NN")
        orchestrated = self._job.options.overlap is not None and self._size["z"] > 1
        passes, over_z = self._passes(tasks)
        return Unit(
            first.name, last.name, first.gather is not None or (in_linear and orchestrated), first.gather,
            last.scatter, passes, over_z,
        )  # fmt: skip

    def _passes(self, tasks: Sequence[Task]) -> tuple[tuple[Pass, ...], tuple[Collective, ...]]:
        if tasks[0].matmul is not None:
            return (self._linear(tasks),), ()
        (task,) = tasks
        steps: list[Collective | None] = [*task.before, None, *task.after]  # None: computation
        cuts = [i for i, c in enumerate(steps) if c is not None and c.axis == "z"]
        passes = []
        for start, stop in pairwise((-1, *cuts, len(steps))):
            clock = _Clock(self._costs)
            for c in steps[start + 1 : stop]:
                if c is None:
                    clock.compute(task.name, self._costs.compute(task))
                else:
                    clock.move(task.name, c)
            passes.append(clock.passed())
        over_z = tuple(c for c in steps if c is not None and c.axis == "z")
        return tuple(passes), over_z

    def _linear(self, tasks: Sequence[Task]) -> Pass:
        if not any(task.before or task.after for task in tasks):
            return self._one_by_one(tasks, hidden_share=0.0)
        sequential = self._one_by_one(tasks, hidden_share=0.0)
        if self._algorithm == "sequential":
            return sequential
        share = self._machine.hidden_share
        fused = self._one_by_one(tasks, hidden_share=share) if share else sequential
        # On CPUs of one host, "auto" is "fused" unless something else was measured.
        if self._algorithm == "fused" or (
            self._algorithm == "auto" and self._machine.device == "cpu"
        ):
            return fused
        chunked = self._chunked(tasks)
        if self._algorithm == "chunked":
            return chunked
        best = min(chunked, fused, key=lambda way: way.seconds)
        return best if best.seconds < _REPLACES_DEFAULT * sequential.seconds else sequential

    def _one_by_one(self, tasks: Sequence[Task], *, hidden_share: float) -> Pass:
        """Runs "sequential"; or "fused", which hides up to a share of what each task moves."""
        clock = _Clock(self._costs)
        for task in tasks:
            compute_s = self._costs.compute(task)
            moved_s = sum(self._costs.collective(c) for c in (*task.before, *task.after))
            shown = 1 - hidden_share * min(compute_s, moved_s) / moved_s if moved_s else 1.0
            for c in task.before:
                clock.move(task.name, c, shown=shown)
            clock.compute(task.name, compute_s)
            for c in task.after:
                clock.move(task.name, c, shown=shown)
        return clock.passed()

    # --- "chunked" -------------------------------------------------------------------------------

    def _chunked(self, tasks: Sequence[Task]) -> Pass:
        clock = _Clock(self._costs)
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
        """Sums the chunk before while one is multiplied."""
        (c,) = task.after
        number, chunk, product_s = self._cut(task, c)
        ends = []
        for _ in range(number):
            clock.compute(task.name, product_s)
            ends.append(clock.start(task.name, chunk))
        for end in ends:
            clock.wait(c.axis, end)

    def _cut(self, task: Task, c: Collective) -> tuple[int, Collective, float]:
        """Returns the number of chunks, and of one the collective and the product's seconds."""
        assert task.matmul is not None
        g = self._size[c.axis]
        # What is cut is the part of one rank; an all-reduce's is the whole.
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

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._now = self._computed = 0.0
        self._free: defaultdict[str, float] = defaultdict(float)
        self._waits: dict[str, float] = {}
        self._pieces: list[Piece] = []

    def compute(self, name: str, seconds: float) -> None:
        if seconds:
            self._add(COMPUTE, name, self._now, seconds, seconds)
            self._now += seconds
            self._computed += seconds

    def start(self, name: str, c: Collective, *, shown: float = 1.0) -> float:
        """Starts a collective; returns when it is done. shown: the share that takes time."""
        wire, seconds = self._costs.wires[c.axis], self._costs.collective(c)
        start = max(self._now, self._free[wire])
        self._free[wire] = start + shown * seconds
        self._add(c.axis, f"{name}: {c.kind}", start, shown * seconds, seconds)
        return self._free[wire]

    def wait(self, axis: str, end: float) -> None:
        if end > self._now:
            self._waits[axis] = self._waits.get(axis, 0.0) + end - self._now
            self._now = end

    def move(self, name: str, c: Collective, *, shown: float = 1.0) -> None:
        """Starts a collective and waits for it."""
        self.wait(c.axis, self.start(name, c, shown=shown))

    def passed(self) -> Pass:
        return Pass(self._now, self._computed, self._waits, tuple(self._pieces))

    def _add(self, stream: str, name: str, start: float, seconds: float, busy_s: float) -> None:
        self._pieces.append(Piece(stream, name, start, start + seconds, busy_s))


def _is(task: Task, layout: str) -> bool:
    """Whether the task is a Linear's product in forward (NT), dgrad (NN) or wgrad (TN)."""
    return task.matmul is not None and task.matmul.layout == layout
