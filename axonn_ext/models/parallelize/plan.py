"""The plan of `parallelize` for each module of a tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

KINDS = (
    "expand", "contract", "embedding", "table", "norm", "head_norm", "plain", "local_heads",
)  # fmt: skip
_PLAN = "_axonn_plan"  # the module attribute that `keep_plan` sets


@dataclass(frozen=True)
class Placement:
    """The placement of one module.

    kind     expand, contract: a Linear of that role; embedding: vocabulary split over x and z,
             features over y; table: an embedding with only its features split, over y; norm:
             features split over y; head_norm: the norm of each head's features, on this rank's
             heads over x; plain: unchanged, whole on every rank
    what     its class and sizes
    arrives  the layout of its input's features: "y", "x", "whole"; empty for token ids
    leaves   the layout of its output's features
    reason   why a module stays plain
    """

    kind: str
    what: str
    arrives: str
    leaves: str
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """The placements of a tree of modules, by name. `print(plan)` shows them.

    Modules without parameters are not listed. notes: outputs of the model that are split.
    local_heads: attentions that run on their rank's heads because the caller's plan said so.
    """

    grid: str
    placements: Mapping[str, Placement]
    notes: tuple[str, ...] = ()
    local_heads: tuple[str, ...] = ()

    def kinds(self) -> dict[str, str]:
        """Returns the plan as the argument `plan` of parallelize."""
        kinds = {name: placement.kind for name, placement in self.placements.items()}
        return kinds | dict.fromkeys(self.local_heads, "local_heads")

    def plain(self) -> dict[str, str]:
        """Returns the modules that stay plain, with the reasons."""
        return {name: p.reason for name, p in self.placements.items() if p.kind == "plain"}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yields the table; modules that repeat from layer to layer share one line."""
        counts: dict[tuple[str, Placement], int] = {}
        for name, placement in self.placements.items():
            key = _pattern(name), placement
            counts[key] = counts.get(key, 0) + 1
        yield f"parallelize on {self.grid}:"
        width = max((len(name) for name, _ in counts), default=0)
        for (name, p), count in counts.items():
            times = f"  ({count} of them)" if count > 1 else ""
            way = f"{p.arrives or 'ids'} -> {p.leaves}"
            why = f": {p.reason}" if p.reason else ""
            yield f"  {name:{width}}  {p.kind:9} {way:14} {p.what}{why}{times}"
        for pattern in dict.fromkeys(map(_pattern, self.local_heads)):
            yield f"  {pattern}: runs on this rank's heads, by the given plan"
        yield from (f"  {note}" for note in self.notes)


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def keep_plan(module: nn.Module, plan: Plan) -> None:
    """Keeps the plan in an attribute of the module, which copies of the module have, too."""
    setattr(module, _PLAN, plan)


def plan_of(module: nn.Module) -> Plan:
    """Returns the plan by which `parallelize` has split this module, also for torch.compile's.

    Raises ValueError if it has split none, or another one inside or around it.
    """
    plan = getattr(module, _PLAN, None)
    if not isinstance(plan, Plan):
        raise ValueError(
            f"plan_of: module must be one that parallelize returned, got a {type(module).__name__}"
        )
    return plan
