"""Computes the seconds that each task of a step takes on a machine by itself."""

from __future__ import annotations

from typing import NamedTuple

from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.step.tasks import Collective, Task, Update
from axonn_ext.spec.grid import COMMUNICATING, GridShape


class UpdateCost(NamedTuple):
    """The seconds of the update of a bucket; see step.tasks.Update.

    crossing: in one direction. gathers: whether there is an all-gather, even if it takes no time.
    """

    device: float
    host: float
    crossing: float
    gather: float
    gathers: bool


class Costs:
    """The costs on one grid of one machine for one dtype.

    A collective costs the same wherever it is issued; two at once on one wire run one after the
    other. wires: axis -> wire, for axes with several ranks. Axes with the same wire share links.
    """

    def __init__(self, machine: Machine, grid: GridShape, dtype: str) -> None:
        self._machine, self._dtype = machine, dtype
        self._size = grid.as_dict()
        axes = [a for a in COMMUNICATING if self._size[a] > 1]
        self._links = {a: machine.link(grid, a) for a in axes}
        self.wires = {a: machine.wire(grid, a) for a in axes}
        self._seconds: dict[Collective, float] = {}

    def collective(self, c: Collective) -> float:
        seconds = self._seconds.get(c)
        if seconds is None:  # many are alike
            link, size = self._links[c.axis], self._size[c.axis]
            seconds = self._seconds[c] = self._machine.collective_seconds(c, link, size)
        return seconds

    def all_reduce(self, axis: str, num_bytes: int) -> float:
        """Returns the seconds of an all-reduce of that many bytes on every rank."""
        size = self._size[axis]
        if size == 1:
            return 0.0
        sent = 2 * (size - 1) * num_bytes // size
        return self.collective(Collective(axis, "all_reduce", sent, "gradients"))

    def compute(self, task: Task, *, in_bf16: bool = False) -> float:
        """Returns the seconds of a task. in_bf16: of products in bf16, if the machine has a peak
        for it, whatever the job's dtype."""
        machine, seconds = self._machine, 0.0
        if task.matmul is not None:
            dtype = "bf16" if in_bf16 and "bf16" in machine.peak_flops else self._dtype
            seconds += machine.matmul_seconds(task.matmul, dtype)
        if task.scores is not None:
            seconds += machine.attention_seconds(task.scores, self._dtype)
        if task.touched_bytes:
            seconds += machine.elementwise_seconds(task.touched_bytes)
        return seconds

    def beside(self, axis: str) -> frozenset[str]:
        """Returns the other axes that use the wire of this axis."""
        own = self.wires.get(axis)
        return frozenset(a for a, wire in self.wires.items() if a != axis and wire == own)

    def update(self, update: Update) -> UpdateCost:
        """Raises PlannerError for an update on the host if the machine's file lacks its rates."""
        machine, gather = self._machine, update.gather
        return UpdateCost(
            machine.elementwise_seconds(update.device_bytes),
            machine.host_seconds(update.host_bytes) if update.host_bytes else 0.0,
            machine.crossing_seconds(update.crossing) if update.crossing else 0.0,
            0.0 if gather is None else self.collective(gather),
            gather is not None,
        )

    def optimizer(self, num_bytes: int) -> float:
        return self._machine.elementwise_seconds(num_bytes)
