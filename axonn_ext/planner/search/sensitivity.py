"""How a plan changes if a machine's links are slower or faster than its file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from axonn_ext.planner.estimate import Estimate, estimate
from axonn_ext.planner.machines.links import Level
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.machines.scaled_links import CHANGE, with_levels, with_rates
from axonn_ext.planner.memory.peak import memory_on
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import Request


@dataclass(frozen=True)
class Variant:
    """The plan for a machine that differs in one property.

    what: the difference, in words. best: the fastest configuration there. same: the step of the
    configuration that is fastest on the original machine.
    """

    what: str
    best: Estimate
    same: Estimate


def variants(request: Request, best: Estimate) -> Iterator[Variant]:
    """Yields the plan for each change of the machine.

    best: the fastest configuration of the request on the original machine.
    """
    for what, machine in machines(request.machine):
        changed = replace(request, machine=machine, top=1)
        same = estimate(best.job, machine, memory_on(best.job, machine))
        yield Variant(what, plan(changed).configs[0], same)


def machines(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Yields the machine with each change, and the change in words.

    One at a time, it changes the bandwidth of each level of links, the latency of all levels, and
    how much groups that share the links of the outermost level slow each other down.
    """
    levels = machine.links.levels
    for place, level in enumerate(levels):
        for sign in (-1, 1):
            factors = [1.0] * len(levels)
            factors[place] += sign * CHANGE
            yield f"bandwidth of {level.name} {sign * CHANGE:+.0%}", with_rates(machine, factors)
    for sign in (-1, 1):
        changed = tuple(_later(level, 1 + sign * CHANGE) for level in levels)
        yield f"latency of all links {sign * CHANGE:+.0%}", with_levels(machine, changed)
    for sign in (-1, 1):
        last = levels[-1]
        more = replace(last, contention=last.contention * (1 + sign * CHANGE))
        what = f"contention in {last.name} {sign * CHANGE:+.0%}"
        yield what, with_levels(machine, (*levels[:-1], more))


def _later(level: Level, factor: float) -> Level:
    """Returns the level with another latency, measured rows included."""
    rows = tuple(
        row if row.latency_s is None else row._replace(latency_s=row.latency_s * factor)
        for row in level.measured
    )
    return replace(level, latency_s=level.latency_s * factor, measured=rows)
