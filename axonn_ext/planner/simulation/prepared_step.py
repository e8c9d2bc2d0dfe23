"""Prepares a rank's step for its simulation: work on the path, and points that concern z."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.memory.kept_weights import table_bytes
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.linear_passes import LinearPasses, Pass, Unit
from axonn_ext.planner.step.tasks import Collective, Program


class OnPath(NamedTuple):
    """What runs on the path between two points that concern z.

    on_z, on_data   the seconds for which its collectives use the wires of z and of data
    """

    seconds: float
    compute_s: float
    on_z: float
    on_data: float
    waits: Mapping[str, float]
    passes: tuple[Pass, ...]


class PointOfZ(NamedTuple):
    """A point of a step that concerns z.

    kind       "use" of a weight, which is gathered if it is not held; "scatter" of its gradient;
               "wait" for a collective on the path
    weight     the name of the weight that is used
    num_bytes  of the whole weight
    after_recomputation  for a use in backward of a recomputed block, the number of its Linear
    """

    kind: str
    name: str
    seconds: float
    weight: str = ""
    num_bytes: float = 0.0
    after_recomputation: int | None = None


Item = OnPath | PointOfZ


class Part(NamedTuple):
    """One part of a micro-batch, as it runs in a layer.

    is_backward_begun  whether backward begins with it
    share              the part of its weights that must be gathered, because it is not held
    number             the number of its pass, which matters only in a pipeline
    """

    items: Sequence[Item]
    prefix: str
    micro_batch: int
    share: float
    number: int
    is_backward_begun: bool = False


class Use(NamedTuple):
    """A use of a weight: the gather of its part that is not held, and its bytes as a whole.

    in_pass  the number of the pass, which matters only in a pipeline
    """

    name: str
    seconds: float
    part: Part
    in_pass: int


class Schedule(NamedTuple):
    """The parts of several micro-batches, and all uses of weights in them, in their order.

    sums    the bytes of whole weights up to each use
    before  how many uses come before each part
    """

    parts: Sequence[Part]
    uses: Sequence[Use]
    sums: Sequence[float]
    before: Sequence[int]


class WireAxes(NamedTuple):
    """The other axes that use the wires of z and of data."""

    on_z: frozenset[str]
    on_data: frozenset[str]


class PreparedStep:
    """A program and its times, which do not depend on the numbers of Overlap.

    units, items: of each part of the program, in order. schedules: the schedules of past
    simulations, by their layers, micro-batches and budgets of gathered weights.
    """

    def __init__(self, job: Job, program: Program, machine: Machine, *, records: bool) -> None:
        self.program, self._job = program, job
        self.schedules: dict[tuple[int, int, int], Schedule] = {}
        self.costs = Costs(machine, job.grid, job.options.dtype)
        self.axes = WireAxes(self.costs.beside("z"), self.costs.beside("data"))
        passes = LinearPasses(job, machine, self.costs, records=records)
        again = program.parts.recomputed_backward
        self.units = [passes.units(tasks) for tasks in program.parts]
        self.items = [
            self._items_of(units, recomputes=tasks is again and bool(again))
            for units, tasks in zip(self.units, program.parts, strict=True)
        ]

    def _items_of(self, units: Sequence[Unit], *, recomputes: bool) -> list[Item]:
        """Returns a part as what runs on the path, and points that concern z."""
        items: list[Item] = []
        path: list[Pass] = []
        sizes = _weights(self._job)
        numbers = iter((3, 2, 1, 0))  # of the Linears of a recomputed block, in backward
        for unit in units:
            name, last_name = unit.tasks[0].name, unit.tasks[-1].name
            if unit.uses_weight:
                self._end_path(items, path)
                weight = name.removesuffix(" dgrad")
                in_backward = recomputes and name.endswith("dgrad")
                items.append(
                    PointOfZ(
                        "use", f"{name}: all_gather", self._seconds(unit.gather),
                        weight, sizes[weight],
                        after_recomputation=next(numbers) if in_backward else None,
                    )
                )  # fmt: skip
            for i, part in enumerate(unit.passes):
                path.append(part)
                if i < len(unit.over_z):
                    self._end_path(items, path)
                    c = unit.over_z[i]
                    items.append(PointOfZ("wait", f"{name}: {c.kind}", self._seconds(c)))
            if unit.scatter is not None:
                self._end_path(items, path)
                seconds = self._seconds(unit.scatter)
                items.append(PointOfZ("scatter", f"{last_name}: reduce_scatter", seconds))
        self._end_path(items, path)
        return items

    def _seconds(self, c: Collective | None) -> float:
        return 0.0 if c is None else self.costs.collective(c)

    def _end_path(self, items: list[Item], path: list[Pass]) -> None:
        """Joins the passes into one item and clears them."""
        if not path:
            return
        overlaps = self._job.options.overlap is not None
        waits: defaultdict[str, float] = defaultdict(float)
        for part in path:
            for axis, seconds in part.waits.items():
                waits[axis] += seconds
        items.append(
            OnPath(
                sum(p.seconds for p in path), sum(p.compute_s for p in path),
                sum(p.busy_s(self.axes.on_z) for p in path) if overlaps else 0.0,
                sum(p.busy_s(self.axes.on_data) for p in path), waits, tuple(path),
            )
        )  # fmt: skip
        path.clear()


def _weights(job: Job) -> dict[str, float]:
    """Returns the bytes of each weight, gathered over z; the names are those of tasks."""
    split = job.grid.x * job.grid.y
    linears = (*job.model.block_linears, job.model.head)
    sizes = {w.name: w.n * w.k * job.options.width / split for w in linears}
    return {**sizes, "embedding": table_bytes(job)}
