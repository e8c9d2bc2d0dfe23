"""The sizes of a grid's axes that a search may choose: fixed, bounded or excluded ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from axonn_ext.planner.machines.machine import Machine
from axonn_ext.spec.files.errors import InputError, clipped
from axonn_ext.spec.grid import COMMUNICATING, GridShape

EXPECTED = (
    "AXIS=SIZE with commas between, such as x=8,z=2..16; an axis is one of "
    f"{', '.join(COMMUNICATING)}, and a size is 8, 2..16, !8 (any but 8), node (groups inside "
    "a node) or *"
)
_NODE = "node"


class AxisRule(NamedTuple):
    """One condition on the size of an axis.

    least, most: the bounds of the size; most is None if there is none. excludes: the size must lie
    outside the bounds instead. in_node: all groups of the axis must lie inside one node, which
    is a unit of the machine's first level of links. text: the condition as it was written.
    """

    axis: str
    text: str
    least: int = 1
    most: int | None = None
    excludes: bool = False
    in_node: bool = False

    def allows(self, grid: GridShape, machine: Machine) -> bool:
        """Whether the grid meets the condition on the machine."""
        size = getattr(grid, self.axis)
        if self.in_node:
            return size == 1 or _is_inside(grid.inner(self.axis) * size, grid.size, machine)
        bounded = self.least <= size and (self.most is None or size <= self.most)
        return bounded != self.excludes


@dataclass(frozen=True)
class AxisRules:
    """Conditions on the axes of a grid, all of which must hold. Other axes have any size."""

    rules: tuple[AxisRule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> AxisRules:
        """Returns the conditions of a text like "x=8,y=node,z=2..16,data=!3,pipe=*".

        An axis that is named twice must meet both conditions. Raises InputError, which says what
        was expected, for any other text.
        """
        return cls(tuple(_parse_rule(item.strip(), text) for item in text.split(",")))

    def allow(self, grid: GridShape, machine: Machine) -> bool:
        """Whether the grid meets all conditions on the machine."""
        return all(rule.allows(grid, machine) for rule in self.rules)

    def names(self, axis: str) -> bool:
        """Whether there is a condition on the axis."""
        return any(rule.axis == axis for rule in self.rules)

    def most(self, axis: str) -> int | None:
        """Returns the largest size that the bounds of an axis allow; None if there is no limit."""
        bounds = (r.most for r in self.rules if r.axis == axis and not r.excludes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def __str__(self) -> str:
        return ",".join(rule.text for rule in self.rules)


def _parse_rule(item: str, text: str) -> AxisRule:
    match = re.fullmatch(r"(\w+)\s*=\s*(\*|node|!?[0-9]{1,9}|[0-9]{1,9}\.\.[0-9]{1,9})", item)
    if match is None or match[1] not in COMMUNICATING:
        raise InputError(f"expected {EXPECTED}; got {clipped(item)!r} in {clipped(text)!r}")
    axis, size = match[1], match[2]
    written = f"{axis}={size}"
    if size in ("*", _NODE):
        return AxisRule(axis, written, in_node=size == _NODE)
    low, _, high = size.lstrip("!").partition("..")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise InputError(f"expected sizes >= 1 and A..B with A <= B, got {written!r}")
    return AxisRule(axis, written, least, most, excludes=size.startswith("!"))


def _is_inside(span: int, num_ranks: int, machine: Machine) -> bool:
    """Whether all groups that span that many neighbouring ranks lie inside a node."""
    of_node = machine.links.levels[0].ranks
    return of_node is None or num_ranks <= of_node or of_node % span == 0
