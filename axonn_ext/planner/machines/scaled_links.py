"""Machines whose links are faster or slower than their files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from axonn_ext.planner.machines.links import Level
from axonn_ext.planner.machines.machine import Machine

CHANGE = 0.2  # how much slower and faster links are assumed in order to see their effect


def with_rates(machine: Machine, factors: Sequence[float]) -> Machine:
    """Returns the machine with the bandwidth of each level of links times a factor."""
    levels = tuple(map(_times, machine.links.levels, factors))
    return with_levels(machine, levels)


def with_levels(machine: Machine, levels: tuple[Level, ...]) -> Machine:
    """Returns the machine with other levels of links."""
    return replace(machine, links=replace(machine.links, levels=levels))


def _times(level: Level, factor: float) -> Level:
    """Returns the level with its bandwidth times a factor, measured rows included."""
    rows = tuple(row._replace(bytes_per_s=row.bytes_per_s * factor) for row in level.measured)
    return replace(level, bytes_per_s=level.bytes_per_s * factor, measured=rows)
