"""Stages whose ranks outnumber a host's cores: a waiting rank leaves its core to others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from axonn_ext.spec.pipeline_simulator import Simulation


def on_shared_cores(found: Simulation, ranks_per_core: float) -> Simulation:
    """Returns the schedule of stages that share cores.

    found: the schedule with the times that stages take while all of them compute. ranks_per_core:
    how many ranks shared a core while these were measured.

    While k of p stages compute, they share all cores, so each is p / k times as fast, but at most
    ranks_per_core times: then each has its own cores. All stages that compute are equally fast, so
    tasks keep their order, and only the clock differs. (It also runs faster for messages under way,
    which are short.)
    """
    if ranks_per_core <= 1:
        return found
    clock = _Clock(found, ranks_per_core)
    tasks = tuple(
        tuple((task, clock.at(start), clock.at(end)) for task, start, end in run)
        for run in found.tasks
    )
    busy = tuple(sum(end - start for _, start, end in run) for run in tasks)
    return replace(found, seconds=clock.at(found.seconds), busy=busy, tasks=tasks)


class _Clock:
    """Maps times of the found schedule to times on shared cores."""

    def __init__(self, found: Simulation, ranks_per_core: float) -> None:
        changes: dict[float, int] = {0.0: 0, found.seconds: 0}
        for _, start, end in (entry for run in found.tasks for entry in run):
            changes[start] = changes.get(start, 0) + 1
            changes[end] = changes.get(end, 0) - 1
        self._found: Sequence[float] = sorted(changes)
        self._speeds: list[float] = []
        self._times = [0.0]
        working = 0
        for begin, end in pairwise(self._found):
            working += changes[begin]
            # While nobody computes, a message is under way.
            speed = min(ranks_per_core, len(found.tasks) / working) if working else 1.0
            self._speeds.append(speed)
            self._times.append(self._times[-1] + (end - begin) / speed)

    def at(self, found: float) -> float:
        index = min(bisect_right(self._found, found), len(self._speeds)) - 1
        return self._times[index] + (found - self._found[index]) / self._speeds[index]
