"""The links of a machine: the bandwidth and latency of a collective, depending on its group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.machines.interpolation import LogField
from axonn_ext.spec.files.tables import Table
from axonn_ext.spec.grid import COMMUNICATING

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "send")  # send: between two stages
_KEPT = 1 << 16  # the largest number of links in the cache


class Link(NamedTuple):
    """A rank's link in a collective: its sending rate, and the latency of one step of the ring.

    by_kind: the links of collective kinds that were measured separately. hides_latency: the larger
    of the times for bytes and latency counts, not their sum. trees_s: the latency of a whole tree
    all-reduce, up and down; None: no trees.
    """

    bytes_per_s: float
    latency_s: float
    by_kind: Mapping[str, Link] | None = None
    hides_latency: bool = False
    trees_s: float | None = None


class MeasuredLink(NamedTuple):
    """A measurement of groups of `size` ranks that all communicate at once.

    inner: the rank distance between neighbours. kind, axis: None if the row holds for all of them.
    latency_s: None if the model's latency is to be used.
    """

    inner: int
    size: int
    bytes_per_s: float
    latency_s: float | None = None
    kind: str | None = None
    axis: str | None = None


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy of links.

    ranks: the ranks of one unit of the level, such as a node; None if there is no limit.
    bytes_per_s: the rate at which one unit of the level below sends (a rank in the first level, a
        node in the second).
    contention: the divisor of bytes_per_s.
    latency_s: the latency of one step of a ring.
    tree_latency_s: the latency of one hop of a tree, which all-reduces between nodes may use; None:
        only rings.
    hides_latency: bytes are sent while the steps wait, as on emulated links.

    Unknowns, for the range of a prediction (planner/uncertainty.py):

    neighbours_measured: the largest number of groups that left a unit of the level below together
        when its rate was measured; None: as many as there can be.
    unmeasured_rate: the factor by which the rate may be higher with more groups.
    full_rate_ranks, least_rate: with more than full_rate_ranks ranks, a job's rate may fall to this
        factor (tapered or shared networks); None: it does not.
    """

    name: str
    ranks: int | None
    bytes_per_s: float
    latency_s: float
    contention: float = 1.0
    tree_latency_s: float | None = None
    hides_latency: bool = False
    neighbours_measured: int | None = None
    unmeasured_rate: float = 1.0
    full_rate_ranks: int | None = None
    least_rate: float = 1.0
    measured: tuple[MeasuredLink, ...] = ()

    def measured_along(self, axis: str) -> tuple[MeasuredLink, ...]:
        """Returns the rows of this axis if there are any, else those that hold for all axes.

        Emulated links have rows for each axis.
        """
        own = tuple(row for row in self.measured if row.axis == axis)
        return own or tuple(row for row in self.measured if row.axis is None)


@dataclass(frozen=True)
class Links:
    """All levels of links, innermost first.

    Source: arXiv:2305.13525, performance model. Groups inside a node use its links, whose speed
    depends on the distance of neighbours and the size of the group. Groups that span nodes share
    the node's sending rate equally.
    """

    levels: tuple[Level, ...]
    machine: str = "this"  # the name of the machine, for messages

    @cached_property
    def of(self) -> Callable[[int, int, str, int], Link]:
        """A cached function (inner, size, axis, num_ranks) -> the link of a group along the axis.

        The group has `size` ranks, neighbours are `inner` ranks apart, and the job has `num_ranks`.
        It raises PlannerError if the machine has too few ranks.
        """
        return functools.lru_cache(maxsize=_KEPT)(self._find)

    @property
    def max_ranks(self) -> int | None:
        """The number of ranks of the machine; None if there is no limit."""
        return self.levels[-1].ranks

    def wire(self, inner: int, size: int, axis: str, num_ranks: int) -> str:
        """Returns a name for the links that the groups of an axis use.

        Axes with the same name share these links: they are a level, or the axis's own links.
        """
        level = self.levels[self._level_of(inner * size, num_ranks)]
        own = any(row.axis == axis for row in level.measured)
        return f"{level.name} along {axis}" if own else level.name

    def _find(self, inner: int, size: int, axis: str, num_ranks: int) -> Link:
        """Returns the measured link; if there is none, the model, corrected by its error nearby."""
        index = self._level_of(inner * size, num_ranks)
        hides = self.levels[index].hides_latency
        model = self._model(inner, size, index)._replace(
            hides_latency=hides, trees_s=self._trees_s(inner, size, index)
        )
        kinds = {row.kind for row in self.levels[index].measured_along(axis)}
        if not kinds:
            return model
        fields = self._fields(index, axis)
        link = self._corrected(model, inner, size, fields[None])
        if kinds == {None}:
            return link
        # Measured all-reduces already include the effect of their algorithm.
        model = model._replace(trees_s=None)
        by_kind = {
            kind: self._corrected(model, inner, size, fields[kind])
            for kind in kinds
            if kind is not None
        }
        return link._replace(by_kind=by_kind)

    def _level_of(self, span: int, num_ranks: int) -> int:
        """Returns the innermost level whose units contain every group.

        For example, groups of three ranks on nodes of eight begin at ranks 0, 3 and 6, and the
        third of them spans two nodes.
        """
        for i, level in enumerate(self.levels):
            if level.ranks is None or num_ranks <= level.ranks or level.ranks % span == 0:
                return i
        raise PlannerError(f"machine {self.machine!r} has {self.max_ranks} ranks, not {span}")

    def _model(self, inner: int, size: int, index: int) -> Link:
        """Returns the rate of the slowest level that a ring crosses, and its steps' mean latency.

        Source: NCCL, src/graph/tuning.cc. The latency of a ring is the sum of the latencies of its
        hops, inside nodes and between them.
        """
        rate, latency, below, members_below = math.inf, 0.0, 1, 1
        for i, level in enumerate(self.levels[: index + 1]):
            ranks = level.ranks or 0  # only the last level may have None, and then i == index
            members = size if i == index else _members(inner, size, ranks)
            if members > members_below:
                shared = level.contention * min(below, inner)
                rate = min(rate, level.bytes_per_s / shared)
                latency += level.latency_s * (size / members_below - size / members)
            below, members_below = ranks, members
        return Link(rate, latency / (size - 1) if size > 1 else 0.0)

    def _trees_s(self, inner: int, size: int, index: int) -> float | None:
        """Returns the latency of a tree all-reduce over nodes; None if there are no trees.

        The ranks of a node form a chain, and the nodes a binary tree, which the data goes up and
        down. Two such trees carry half of the data each, so that all nodes send equally much.

        Source: NCCL, src/graph/tuning.cc: 2 ((ranks / nodes - 1) latency inside + log2(nodes)
        latency between).
        """
        levels = self.levels[: index + 1]
        if index == 0 or size == 1:
            return None
        total, below = 0.0, 1
        for i, level in enumerate(levels):
            members = size if i == index else _members(inner, size, level.ranks or 0)
            if members > below:
                if level.tree_latency_s is None:
                    return None
                count = members // below
                hops = count - 1 if i == 0 else count.bit_length() - 1
                total += 2 * hops * level.tree_latency_s
            below = members
        return total

    @staticmethod
    def _corrected(model: Link, inner: int, size: int, fields: tuple[LogField, LogField]) -> Link:
        rate, latency = fields
        point = (inner, size)
        return model._replace(
            bytes_per_s=model.bytes_per_s * rate.at(point),
            latency_s=model.latency_s * latency.at(point),
        )

    @cached_property
    def _fields(self) -> Callable[[int, str], dict[str | None, tuple[LogField, LogField]]]:
        return functools.cache(self._make_fields)

    def _make_fields(self, index: int, axis: str) -> dict[str | None, tuple[LogField, LogField]]:
        """Returns the ratios of measured to modelled rates and latencies, by kind of collective.

        The key None stands for all kinds. A row without a kind holds for each kind.
        """
        measured = self.levels[index].measured_along(axis)
        rows = [(row, self._model(row.inner, row.size, index)) for row in measured]
        fields = {}
        for kind in {None, *(row.kind for row in measured)}:
            mine = [(r, m) for r, m in rows if kind is None or r.kind in (kind, None)]
            rates = [((r.inner, r.size), r.bytes_per_s / m.bytes_per_s) for r, m in mine]
            latencies = [
                ((r.inner, r.size), r.latency_s / m.latency_s)
                for r, m in mine
                if r.latency_s is not None
            ]
            fields[kind] = LogField(rates), LogField(latencies)
        return fields


def _members(inner: int, size: int, ranks: int) -> int:
    """Returns how many ranks of a group are in one unit of `ranks` ranks.

    If groups straddle units in different ways, it is a common divisor of their numbers.
    """
    return 1 if ranks % inner else math.gcd(size, ranks // inner)


def read_links(table: Table, machine: str) -> Links:
    """Reads the array `levels` of a machine's file. Raises InputError naming file and key."""
    rows = list(table.tables("levels"))
    if not rows:
        raise table.error("levels", "an array of at least one table")
    levels = tuple(_read_level(row, may_be_open=row is rows[-1]) for row in rows)
    for (inner, outer), row in zip(pairwise(levels), rows[1:], strict=True):
        if outer.ranks is not None and outer.ranks % (inner.ranks or 1):
            raise row.error("ranks", f"a multiple of the {inner.ranks} of {inner.name!r}")
    return Links(levels, machine)


def _read_level(row: Table, *, may_be_open: bool) -> Level:
    ranks = None if may_be_open and not row.has("ranks") else row.count("ranks")
    level = Level(
        name=row.text("name"),
        ranks=ranks,
        bytes_per_s=row.positive("bytes_per_s"),
        latency_s=row.positive("latency_s"),
        contention=row.at_least("contention", 1, 1.0),
        tree_latency_s=row.positive("tree_latency_s") if row.has("tree_latency_s") else None,
        hides_latency=row.flag("hides_latency", False),
        neighbours_measured=_optional_count(row, "neighbours_measured"),
        unmeasured_rate=row.at_least("unmeasured_rate", 1, 1.0),
        full_rate_ranks=_optional_count(row, "full_rate_ranks"),
        least_rate=row.positive("least_rate", 1.0, most=1),
        measured=tuple(_read_measured(r, ranks) for r in row.tables("measured")),
    )
    row.finish()
    return level


def _optional_count(row: Table, key: str) -> int | None:
    return row.count(key) if row.has(key) else None


def _read_measured(row: Table, ranks: int | None) -> MeasuredLink:
    link = MeasuredLink(
        inner=row.count("inner"),
        size=row.count("size", least=2),
        bytes_per_s=row.positive("bytes_per_s"),
        latency_s=row.positive("latency_s") if row.has("latency_s") else None,
        kind=row.one_of("kind", KINDS) if row.has("kind") else None,
        axis=row.one_of("axis", COMMUNICATING) if row.has("axis") else None,
    )
    if ranks is not None and link.inner * link.size > ranks:
        raise row.error("size", f"such that inner * size <= ranks={ranks}")
    row.finish()
    return link
