"""What is timed for one op in one shape on one grid, and what its result must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from axonn_ext import ops
from axonn_ext.bench.reference import Expected, Outputs
from axonn_ext.calibrate.shapes import Shape
from axonn_ext.grid import AxisGroup
from axonn_ext.spec.grid import GridShape


@dataclass(frozen=True)
class Spec:
    """What is asked for: an op, its sizes, and how it is run."""

    op: str
    shape: Shape
    grid: GridShape
    dtype: str = "fp32"
    algorithms: tuple[str, ...] = ops.ALGORITHMS
    options: Mapping[str, str] = field(default_factory=dict)  # role, layout; where the op has them
    device: str = "cpu"  # or "cuda": the current GPU


@dataclass(frozen=True)
class Case:
    """One rank's calls. All ranks of the grid make them together.

    floor        the matmuls of this rank, whole and out of place, and (block) its other arithmetic;
                 nothing is communicated
    collective   the c10d collectives that "sequential" issues, without the arithmetic; None where
                 there are none
    algorithms   the op itself, by algorithm: returns its result and gradients by name
    expected     what those must be, on this rank
    complete     sums gradients over the axes over which backward leaves parts of them (collective)
    """

    spec: Spec
    floor: Callable[[], object]
    collective: Callable[[], object] | None
    algorithms: Mapping[str, Callable[[], Outputs]]
    expected: Mapping[str, Expected]
    complete: Callable[[Outputs], Outputs] = lambda outputs: outputs


# c10d's collectives with outputs of their own, which every supported torch has under these names.
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Collective:
    """A c10d collective: what it does with this rank's input of that shape."""

    kind: str  # "all_gather", "reduce_scatter" or "all_reduce", of rows
    axis: AxisGroup
    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    def bind(self) -> Callable[[], object]:
        """The call. Its output is fresh each time, as the op's is."""
        dtype = self.dtype
        if self.kind != "all_gather" and dtype == torch.bfloat16 and self.device == "cpu":
            dtype = torch.float32  # c10d adds in the tensor's dtype: "sequential" sends fp32
        source = torch.ones(self.sizes, dtype=dtype, device=self.device)
        name, size = self.axis.name, self.axis.size
        issue: Callable[[], Tensor] = {
            "all_gather": partial(gather_rows, source, self.axis),
            "reduce_scatter": partial(_c10d.reduce_scatter_tensor, source, "sum", size, name),
            "all_reduce": partial(_c10d.all_reduce, source, "sum", name),
        }[self.kind]
        return lambda: _c10d.wait_tensor(issue())


def gather_rows(shard: Tensor, axis: AxisGroup) -> Tensor:
    """The gather that "sequential" issues; see csrc/ops/composed/c10d_collectives.cpp."""
    output = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    axis.process_group._allgather_base(output, shard).wait()  # 2.11's name, and 2.14's
    return output


def bind_all(collectives: Sequence[Collective]) -> Callable[[], object] | None:
    """One call that issues all of them in order, or None if no axis has several ranks."""
    calls = [c.bind() for c in collectives if c.axis.size > 1 and min(c.sizes) > 0]
    return partial(call_all, calls) if calls else None


def call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
