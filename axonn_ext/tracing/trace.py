"""The record of all communication that a piece of code issues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_ext.grid import axis_of
from axonn_ext.ops.specs import SPECS
from axonn_ext.ops.traffic import Collective
from axonn_ext.tracing import _torch_ops

_COLUMNS = ("axis", "collective", "dtype", "calls", "bytes per rank")


@dataclass(frozen=True)
class CommunicationRecord:
    """One collective that was issued.

    axis            the Grid's axis; for other groups their description, or else their name
    collective      "all_gather", "reduce_scatter", "all_reduce", or another of torch.distributed
    bytes_per_rank  what a rank sends in the bandwidth-optimal algorithm (see trace_communication)
    op              whose call issued it, as "axonn::linear_forward" or "c10d::allreduce_"
    dtype           of what crosses ranks
    group_size      ranks that take part
    """

    axis: str
    collective: str
    bytes_per_rank: int
    op: str
    dtype: torch.dtype
    group_size: int


@dataclass
class CommunicationTrace:
    """What `trace_communication` recorded, in the order of issue; complete at any time."""

    records: list[CommunicationRecord] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes per rank over all axes."""
        return sum(record.bytes_per_rank for record in self.records)

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes per rank along each axis, in the order in which axes were first used."""
        total: Counter[str] = Counter()
        for record in self.records:
            total[record.axis] += record.bytes_per_rank
        return dict(total)

    def summary(self) -> str:
        """A plain-text table: calls and bytes of each axis, collective and dtype, and in all."""
        calls: Counter[tuple[str, str, str]] = Counter()
        sent: Counter[tuple[str, str, str]] = Counter()
        for record in self.records:
            key = (record.axis, record.collective, str(record.dtype).removeprefix("torch."))
            calls[key] += 1
            sent[key] += record.bytes_per_rank
        first_use = list(self.bytes_by_axis())
        keys = sorted(calls, key=lambda key: first_use.index(key[0]))
        rows = [(*key, f"{calls[key]:,}", f"{sent[key]:,}") for key in keys]
        return _table([*rows, ("total", "", "", f"{len(self.records):,}", f"{self.total_bytes:,}")])


@contextmanager
def trace_communication() -> Iterator[CommunicationTrace]:
    """Records every collective that is issued inside, those within fused ops included.

        with axonn_ext.trace_communication() as trace:
            model.loss(token_ids, labels).backward()
        trace.bytes_by_axis()      {"x": 1234, ...}
        print(trace.summary())

    Seen are the ops of axonn_ext and torch's own collectives (torch.distributed, functional
    collectives, DTensor), in forward, backward and recomputation, each as often as it is issued.
    Groups of one rank issue nothing. Nothing is executed for the record: it is computed from
    shapes, so it is the same under FakeTensorMode, on meta tensors and in fake process groups.

    Bytes are what one rank sends in the bandwidth-optimal algorithm: for a group of G ranks,
    (G-1)/G of the whole tensor for an all-gather or reduce-scatter, twice that for an all-reduce,
    in whole elements, rounded up. They do not depend on the route: through shared memory peers read
    them in place, and what is pipelined in chunks is one record. `algorithm` matters in one
    respect: c10d's sums of bfloat16 cross ranks in float32, which is recorded for "sequential" and
    "chunked"; "auto" is recorded like "fused".

    Traces may be nested, and each records everything; an exception ends a trace like the end of the
    block does. The trace is this thread's, with the backward passes that it starts. torch.compile
    works inside, and compiled functions are recorded as their graphs issue; a CUDA graph that is
    replayed is not seen.

    Raises NotImplementedError, inside and before anything is issued, for a collective of torch that
    it cannot count (those of torch.ops.symm_mem).
    """
    trace = CommunicationTrace()
    with _Recorder(trace.records):
        yield trace


class _Recorder(TorchDispatchMode):
    """Sits below autograd, so it sees each op once, in whichever pass it is called."""

    def __init__(self, records: list[CommunicationRecord]) -> None:
        super().__init__()
        self._records = records

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile inside; its graphs call our ops as they are, in sight."""
        return True

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        issued = list(_issued_by(func, args, kwargs))
        result = func(*args, **kwargs)
        self._records += [
            CommunicationRecord(
                _axis(collective.group_name),
                collective.kind,
                collective.bytes_per_rank,
                func._schema.name,
                collective.dtype,
                collective.group_size,
            )
            for collective in issued
            if collective.group_size > 1
        ]
        return result


def _issued_by(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Collective]:
    if op.namespace == "axonn":
        spec = SPECS.get(op._opname)
        if spec is not None:  # else one with an underscore, on its own: kernels' business
            yield from spec.collectives(spec.call(args, kwargs))
    elif op.namespace in _torch_ops.NAMESPACES and _torch_ops.takes_group(op):
        yield from _torch_ops.collectives_of(op, args, kwargs)


def _axis(group_name: str) -> str:
    """What a record calls the group of that c10d name."""
    try:
        resolve = torch.distributed.distributed_c10d._resolve_process_group
        group = resolve(group_name)  # type: ignore[arg-type]
    except RuntimeError:  # fake tensors need no group to exist
        return group_name
    description = group.group_desc
    if description in ("", "undefined"):  # c10d's word for none
        return group_name
    return axis_of(description) or description


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
