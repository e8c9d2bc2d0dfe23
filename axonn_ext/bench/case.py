"""A case: one op in one shape on one grid, the calls that are timed, and the expected result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from axonn_ext import ops
from axonn_ext.bench.reference import Expected, Outputs
from axonn_ext.calibrate.shapes import Shape
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.spec.grid import GridShape


@dataclass(frozen=True)
class Spec:
    """The op to time, its sizes, and how it is run."""

    op: str
    shape: Shape
    grid: GridShape
    dtype: str = "fp32"
    algorithms: tuple[str, ...] = ops.ALGORITHMS
    options: Mapping[str, str] = field(default_factory=dict)  # role and layout, if the op has them
    device: str = "cpu"  # or "cuda" for the current GPU


@dataclass(frozen=True)
class Case:
    """The calls of one rank. All ranks of the grid make them together.

    floor        the matmuls of this rank, each as a whole and out of place, and for "block" its
                 other computation; no communication
    collective   the c10d collectives that "sequential" issues, without computation; None if there
                 are none
    algorithms   algorithm -> the op itself, which returns its result and gradients by name
    expected     the correct results and gradients on this rank
    complete     sums gradients over the remaining axes after backward; all ranks must call it
    """

    spec: Spec
    floor: Callable[[], object]
    collective: Callable[[], object] | None
    algorithms: Mapping[str, Callable[[], Outputs]]
    expected: Mapping[str, Expected]
    complete: Callable[[Outputs], Outputs] = lambda outputs: outputs


# These are c10d's out-of-place collectives, which every supported torch has under these names.
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Collective:
    """A c10d collective of an input of that shape."""

    kind: str  # "all_gather", "reduce_scatter" or "all_reduce"; rows are gathered or scattered
    axis: AxisGroup
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    def bind(self) -> Callable[[], object]:
        """Returns the call. Like the op, it makes a new output each time."""
        dtype = self.dtype
        low_precision = dtype in (torch.bfloat16, torch.float16)
        if self.kind != "all_gather" and low_precision and self.device == "cpu":
            dtype = torch.float32  # "sequential" sends fp32, since c10d adds in the tensors' dtype
        source = torch.ones(self.sizes, dtype=dtype, device=self.device)
        name, size = self.axis.name, self.axis.size
        issue: Callable[[], Tensor] = {
            "all_gather": partial(gather_rows, source, self.axis),
            "reduce_scatter": partial(_c10d.reduce_scatter_tensor, source, "sum", size, name),
            "all_reduce": partial(_c10d.all_reduce, source, "sum", name),
        }[self.kind]
        return lambda: _c10d.wait_tensor(issue())


def gather_rows(shard: Tensor, axis: AxisGroup) -> Tensor:
    """Issues the gather of "sequential"; see csrc/ops/composed/c10d_collectives.cpp."""
    output = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    axis.process_group._allgather_base(output, shard).wait()  # the name in torch 2.11 to 2.15
    return output


def bind_all(collectives: Sequence[Collective]) -> Callable[[], object] | None:
    """Returns a call that issues all of them in order, or None if no axis has several ranks."""
    calls = [c.bind() for c in collectives if c.axis.size > 1 and min(c.sizes) > 0]
    return partial(call_all, calls) if calls else None


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
