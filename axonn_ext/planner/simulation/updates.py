"""Simulates the step of an optimizer that updates bucket by bucket.

The optimizer is axonn_ext.optim.bucketed: with offload, one bucket is updated on the host while the
next one's gradients cross and the previous one returns; with ZeRO, each bucket's new parameters are
all-gathered over the data axis after its update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from axonn_ext.planner.simulation.costs import Costs, UpdateCost
from axonn_ext.planner.step.tasks import Collective, OptimizerWork


class OptimizerStep(NamedTuple):
    """A simulated step of the optimizer.

    update_s  the seconds it would take if all-gathers took no time
    seconds   the seconds with them
    gathers   the beginning and the end of each all-gather
    waits     what Muon sends before that, a sum for each axis, with its seconds
    """

    update_s: float
    seconds: float
    gathers: tuple[tuple[float, float], ...]
    waits: tuple[tuple[Collective, float], ...] = ()


def optimizer_step(work: OptimizerWork, costs: Costs, *, overlaps: bool) -> OptimizerStep:
    """Returns the step; overlaps: all-gathers run alongside the updates of later buckets.

    Raises PlannerError for offload on a machine whose file does not say how fast its host is.
    """
    first_s = costs.optimizer(work.num_bytes) + _orthogonalised_s(work, costs)
    waits = _waits(work, costs)
    if not work.updates:
        return OptimizerStep(first_s, first_s, (), waits)
    cost_of = {update: costs.update(update) for update in set(work.updates)}
    updates = [cost_of[update] for update in work.updates]
    alone = _Buckets([u._replace(gather=0.0) for u in updates], first_s, overlaps).run()
    buckets = _Buckets(updates, first_s, overlaps)
    seconds = buckets.run()
    gathers = tuple(buckets.gathers) if work.gathers else ()
    return OptimizerStep(alone, seconds, gathers, waits)


def _orthogonalised_s(work: OptimizerWork, costs: Costs) -> float:
    """Returns the seconds of Muon's products and elementwise work."""
    return sum(
        times * costs.compute(task, in_bf16=True)
        for tasks, times in work.matrices
        for task in tasks
    )


def _waits(work: OptimizerWork, costs: Costs) -> tuple[tuple[Collective, float], ...]:
    """Returns what Muon sends along each axis: nothing of it is assumed to be hidden."""
    found: dict[str, tuple[Collective, float]] = {}
    issued = [
        (c, times) for tasks, times in work.matrices for task in tasks for c in task.collectives()
    ]
    for c, times in (*issued, *((c, 1) for c in work.sent)):
        before, seconds = found.get(c.axis, (c._replace(num_bytes=0), 0.0))
        total = before._replace(num_bytes=before.num_bytes + times * c.num_bytes)
        found[c.axis] = total, seconds + times * costs.collective(c)
    return tuple(found.values())


def closed_form_s(work: OptimizerWork, costs: Costs, *, overlaps: bool) -> float:
    """Returns approximate seconds of optimizer_step, as if each bucket were in the middle of many.

    A bucket then takes as long as its update or, with offload, its crossing if that is longer; with
    overlap, all-gathers run alongside all of them.
    """
    update_s = gather_s = 0.0
    for update, count in Counter(work.updates).items():
        cost = costs.update(update)
        update_s += count * (max(cost.host, cost.crossing) + cost.device)
        gather_s += count * cost.gather
    first_s = costs.optimizer(work.num_bytes) + _orthogonalised_s(work, costs)
    first_s += sum(seconds for _, seconds in _waits(work, costs))
    return first_s + (max(update_s, gather_s) if overlaps else update_s + gather_s)


class _Buckets:
    """The streams of a rank, with the time at which each is free, and the host's program."""

    def __init__(self, updates: Sequence[UpdateCost], start_s: float, overlaps: bool) -> None:
        self._updates, self._overlaps = updates, overlaps
        self._host = self._device = self._axis = start_s
        self._down = self._up = self._worker = start_s
        self._done: list[float] = []  # when the host has updated each bucket
        self._returned: list[float] = []  # when its values are back on the device
        self.gathers: list[tuple[float, float]] = []

    def run(self) -> float:
        """Returns the time at which all parameters are there, in the same order as bucketed.py."""
        count = len(self._updates)
        for i in range(count):
            self._begin(i)
            if i >= 1:
                self._give(i - 1)
            if i >= 2:
                self._put(i - 2)
        self._give(count - 1)
        for i in range(max(0, count - 2), count):
            self._put(i)
        return max(self._host, self._device, self._up)

    def _begin(self, i: int) -> None:
        update = self._updates[i]
        if not update.host:
            self._device += update.device
            return
        self._down = max(self._down, self._host, self._device) + update.crossing
        slot_free = self._returned[i - 2] if i >= 2 else 0.0
        self._worker = max(self._worker, self._down, slot_free) + update.host
        self._done.append(self._worker)

    def _give(self, i: int) -> None:
        update = self._updates[i]
        if update.host:
            self._host = max(self._host, self._done[i])
            self._up = max(self._up, self._done[i], self._device) + update.crossing
            self._returned.append(self._up)
            if update.gathers:
                self._device = max(self._device, self._up)
        start = max(self._device, self._axis)
        self._axis = start + update.gather
        self.gathers.append((start, self._axis))
        if not self._overlaps:
            self._device = max(self._device, self._axis)

    def _put(self, i: int) -> None:
        update = self._updates[i]
        if update.gathers:
            self._device = max(self._device, self.gathers[i][1])
        if update.host:
            self._device += update.device
