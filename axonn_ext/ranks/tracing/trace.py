"""Records all communication that a piece of code issues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from axonn_ext.ops.specs import SPECS
from axonn_ext.ops.traffic import Collective
from axonn_ext.ranks.grid import AxisGroup, axis_of
from axonn_ext.ranks.tracing import _torch_ops

_COLUMNS = ("axis", "collective", "dtype", "calls", "bytes per rank")


@dataclass(frozen=True)
class CommunicationRecord:
    """One collective that was issued.

    axis            the axis of the Grid; for another group its description or else its name
    collective      "all_gather", "reduce_scatter", "all_reduce", "send" (between the stages of a
                    pipeline, too), or another of torch.distributed
    bytes_per_rank  the bytes that a rank sends in the bandwidth-optimal algorithm (see
                    trace_communication)
    op              the op that issued it, such as "axonn::linear_forward" or "c10d::allreduce_"
    dtype           the dtype in which the data crosses ranks
    group_size      the number of ranks that take part
    """

    axis: str
    collective: str
    bytes_per_rank: int
    op: str
    dtype: torch.dtype
    group_size: int


@dataclass
class CommunicationTrace:
    """The records of `trace_communication` so far, in the order in which they were issued."""

    records: list[CommunicationRecord] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """The bytes per rank over all axes."""
        return sum(record.bytes_per_rank for record in self.records)

    def bytes_by_axis(self) -> dict[str, int]:
        """Returns the bytes per rank along each axis, in the order of the axes' first use."""
        total: Counter[str] = Counter()
        for record in self.records:
            total[record.axis] += record.bytes_per_rank
        return dict(total)

    def summary(self) -> str:
        """Returns a text table of the calls and bytes of each axis, collective and dtype."""
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
    """Records every collective that is issued inside, including those within fused ops.

        with axonn_ext.trace_communication() as trace:
            model.loss(token_ids, labels).backward()
        trace.bytes_by_axis()      {"x": 1234, ...}
        print(trace.summary())

    It records the ops of axonn_ext and torch's own collectives (torch.distributed, functional
    collectives, DTensor) in forward, backward and recomputation, each time that they are issued.
    Groups of one rank issue nothing. A record is computed from the shapes of a call, so it is the
    same under FakeTensorMode, on meta tensors and in fake process groups.

    Bytes are what one rank sends in the bandwidth-optimal algorithm. In a group of G ranks this is
    (G-1)/G of the whole tensor for an all-gather or reduce-scatter, and twice that for an
    all-reduce, rounded up to whole elements. The bytes do not depend on how the data travels: they
    are the same if peers read it in place through shared memory, and a collective that is pipelined
    in chunks is one record. `algorithm` matters in only one respect: c10d sends bfloat16 and
    float16 in float32 for sums on the CPU, which is recorded for "sequential" and "chunked".
    "auto" is recorded like "fused".

    Traces may be nested, and each records everything. An exception ends a trace, like the end of
    the block. A trace covers the current thread and the backward passes that it starts. Messages
    between the stages of a pipeline are recorded as "send" when a stage hands them over; the form
    that precedes the first of them is not.
    torch.compile works inside, and compiled functions are recorded as their graphs issue
    collectives. The replay of a CUDA graph is not recorded.

    The block raises NotImplementedError at a collective of torch that cannot be counted (those of
    torch.ops.symm_mem), before it is issued.
    """
    trace = CommunicationTrace()
    with _Recorder(trace.records):
        yield trace


class _Recorder(TorchDispatchMode):
    """Sees each op once, in whichever pass it is called, because it lies below autograd."""

    def __init__(self, records: list[CommunicationRecord]) -> None:
        super().__init__()
        self._records = records

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile inside the mode, which then sees our ops in its graphs."""
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
        self.add(func._schema.name, issued)
        return result

    def add(self, op: str, issued: Sequence[Collective]) -> None:
        """Records the collectives that an op has issued."""
        self._records += [
            CommunicationRecord(
                _axis(collective.group_name),
                collective.kind,
                collective.bytes_per_rank,
                op,
                collective.dtype,
                collective.group_size,
            )
            for collective in issued
            if collective.group_size > 1
        ]


def record_issued(kind: str, op: str, tensor: torch.Tensor, axis: AxisGroup) -> None:
    """Records, in the traces of this thread, a collective along the axis that is not a torch op.

    It goes over a separate communicator, or is a message that another thread will send: ops of a
    thread that was started outside the trace are not traced.

    kind: the value of CommunicationRecord.collective
    op: the name of its origin
    tensor: the tensor that a rank passes in
    """
    sent = Collective(kind, axis.name, axis.size, tensor.numel(), tensor.dtype)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _Recorder):
            mode.add(op, [sent])


def _issued_by(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Collective]:
    if op.namespace == "axonn":
        spec = SPECS.get(op._opname)
        if spec is not None:  # ops that begin with an underscore have no spec
            yield from spec.collectives(spec.call(args, kwargs))
    elif op.namespace in _torch_ops.NAMESPACES and _torch_ops.takes_group(op):
        yield from _torch_ops.collectives_of(op, args, kwargs)


def _axis(group_name: str) -> str:
    """Returns the name, in records, of the group with that c10d name."""
    try:
        resolve = torch.distributed.distributed_c10d._resolve_process_group
        group = resolve(group_name)  # type: ignore[arg-type]
    except RuntimeError:  # fake tensors need no group to exist
        return group_name
    description = group.group_desc
    if description in ("", "undefined"):  # c10d says "undefined" where there is no description
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
