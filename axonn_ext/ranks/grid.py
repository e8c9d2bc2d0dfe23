"""The grid of all ranks: the coordinates of this rank, and the process groups of the axes.

From slowest to fastest in rank order, the axes are data, pipe, z, y, x: x has the fastest links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from axonn_ext import _C, ops  # noqa: F401  (ops registers torch.ops.axonn)
from axonn_ext.ranks import meeting
from axonn_ext.ranks.communicators import Communicators
from axonn_ext.ranks.rank_values import device_type
from axonn_ext.ranks.side_groups import OwnedGroups, SideGroups, new_group
from axonn_ext.spec import settings
from axonn_ext.spec.communicators import grid_groups, overlap_axes
from axonn_ext.spec.grid import AXES, GridShape

_C10D_SECONDS = 30.0  # how long after AXONN_TIMEOUT_SECONDS c10d's collectives fail
Dims = Mapping[int, Sequence[str]]  # tensor dim -> the axes that split it, slowest first


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis (or "model": x, y and z together), as the ops take a group."""

    axis: str
    name: str  # the name of the c10d process group
    size: int
    rank: int  # this rank's coordinate
    process_group: ProcessGroup = field(repr=False, compare=False)
    owned: OwnedGroups | None = field(default=None, repr=False, compare=False)  # keeps it alive

    def __deepcopy__(self, memo: dict[int, object]) -> AxisGroup:
        """Returns itself, so that a copy of a module communicates in the same groups."""
        return self


class Grid:
    """The grid of all ranks. It needs an initialised `torch.distributed`.

        grid = Grid(x=2, y=2, z=2)
        grid.size("x"), grid.coords["x"], grid.group("x")
        grid.close()

    All ranks must make the same grids in the same order. Several grids may exist at once. Each has
    its own c10d process groups: one for each axis of several ranks, one that all other axes share,
    one for x, y and z together, one for the first and the last stage of a pipeline, and those that
    `neighbours` makes. They end with `close`, which `with Grid(...) as grid:` calls unless the
    block raises. Over gloo, they also end when no grid, AxisGroup or module refers to them any
    more; a bare ProcessGroup or its name does not keep them. Over NCCL, they stay until `close` or
    the end of the process.

    A process forked from a rank cannot use its groups.

    communicators: separate NCCL communicators, made on request by `communicators.get`.

    Raises:
        ValueError: the product of the sizes is not the world size.
        RuntimeError: `torch.distributed` is not initialised.
    """

    def __init__(self, x: int = 1, y: int = 1, z: int = 1, data: int = 1, pipe: int = 1) -> None:
        self.shape = GridShape(x=x, y=y, z=z, data=data, pipe=pipe)
        if not dist.is_initialized():
            raise RuntimeError(
                "Grid needs an initialised torch.distributed: call "
                "torch.distributed.init_process_group() first, under torchrun for several ranks"
            )
        self.world_size = dist.get_world_size()
        if self.shape.size != self.world_size:
            raise ValueError(
                f"grid {self.shape} has {self.shape.size} ranks but the world has {self.world_size}"
            )
        self.rank = dist.get_rank()
        # These are plain numbers, not tensors, so that a grid can be made under FakeTensorMode.
        sizes = [getattr(self.shape, axis) for axis in AXES]
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(AXES))]
        self.coords = {
            axis: self.rank // stride % size
            for axis, stride, size in zip(AXES, strides, sizes, strict=True)
        }
        # Before any group is made, since making one could take long if ranks differ.
        grid = {f"size of {axis}": str(size) for axis, size in zip(AXES, sizes, strict=True)}
        meeting.same_in_world(grid | meeting.job_values(), what="Grid")
        self._owned = OwnedGroups()
        self._alone: ProcessGroup | None = None
        self._groups: dict[str | tuple[str, int], AxisGroup] = {}  # also "model", "ends" and those
        for axis, stride in zip(AXES, strides, strict=True):  # of `neighbours`
            self._groups[axis] = self._make_group(axis, stride)
        self._groups["model"] = self._make_model_group()
        self._groups["ends"] = self._make_ends(strides[AXES.index("pipe")])
        self._mesh: DeviceMesh | None = None
        self.side_groups = SideGroups(self._owned)
        self.communicators = Communicators(
            {
                axis: dist.get_process_group_ranks(self.group(axis))
                for axis in overlap_axes(self.shape)
            }
        )

    def close(self) -> None:
        """Ends the groups of this rank, their connections and threads, and the communicators.

        All ranks call it after the last collective, also of modules on this grid. Afterwards
        nothing may use the groups; asking for one raises RuntimeError. A second call does nothing.
        """
        if self._owned.closed:
            return
        self._groups.clear()
        self._alone = self._mesh = None
        self.side_groups.close()
        try:
            self.communicators.close()
        finally:
            self._owned.close()
        _C.symmetric_memory_bytes_in_use()  # as a side effect, frees the memory of ended groups

    def __enter__(self) -> Grid:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is None:  # else peers may still use the groups; these end with the process
            self.close()

    def _group(self, name: str | tuple[str, int]) -> AxisGroup:
        if self._owned.closed:
            raise RuntimeError(f"Grid {self.shape} is closed: make another one")
        return self._groups[name]

    def _make_model_group(self) -> AxisGroup:
        """Makes the group of the ranks of x, y and z, which hold one copy of the model.

        If at most one of these axes has several ranks, this is the group of that axis.
        """
        axes = [self._groups[axis] for axis in ("x", "y", "z")]
        if "model" not in grid_groups(self.shape):
            return max(axes, key=lambda group: group.size)
        size = math.prod(group.size for group in axes)
        first = self.rank - self.rank % size
        return self._group_of("model", [first + i for i in range(size)])

    def _make_ends(self, stride: int) -> AxisGroup:
        """Makes the group of the first and the last stage; stages between them get groups of one.

        They need one, since c10d names a group after the number of groups a rank has made before.
        """
        stages = self._groups["pipe"]
        if "ends" not in grid_groups(self.shape):
            return stages
        first = self.rank - stages.rank * stride
        ends = [first, first + (stages.size - 1) * stride]
        return self._new_group("pipe", ends if self.rank in ends else [self.rank])

    def _make_group(self, axis: str, stride: int) -> AxisGroup:
        first = self.rank - self.coords[axis] * stride
        return self._group_of(axis, [first + i * stride for i in range(getattr(self.shape, axis))])

    def _group_of(self, axis: str, ranks: list[int]) -> AxisGroup:
        # Axes of one rank share a group, since each gloo group has a thread that polls 100 times a
        # second.
        if len(ranks) > 1:
            return self._new_group(axis, ranks)
        if self._alone is None:
            self._alone = self._new_group(axis, ranks).process_group
        return AxisGroup(axis, self._alone.group_name, 1, 0, self._alone, self._owned)

    def _new_group(self, axis: str, ranks: list[int]) -> AxisGroup:
        # c10d's own limit, at which NCCL's watchdog ends the process, is later than ours, whose
        # errors say what happened.
        patience = timedelta(seconds=settings.load().timeout_seconds + _C10D_SECONDS)
        group = new_group(
            ranks, description=_describe(axis, ranks), patience=patience,
            options=_nccl_options(patience),
        )  # fmt: skip
        self._owned.add(group)
        place = ranks.index(self.rank)
        return AxisGroup(axis, group.group_name, len(ranks), place, group, self._owned)

    def __repr__(self) -> str:
        return f"Grid({self.shape})"

    def __deepcopy__(self, memo: dict[int, object]) -> Grid:
        """Returns itself, so that a copy of a module uses the same grid."""
        return self

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis. Raises ValueError for an unknown axis."""
        return self.axis(axis).size

    def axis(self, axis: str) -> AxisGroup:
        """Returns this rank's group along an axis. Raises ValueError for an unknown axis."""
        if axis not in AXES:
            raise ValueError(f"axis must be one of {', '.join(AXES)}, got {axis!r}")
        return self._group(axis)

    @property
    def model_group(self) -> AxisGroup:
        """The ranks of x, y and z together, which hold one copy of the model."""
        return self._group("model")

    @property
    def ends(self) -> AxisGroup:
        """The first and the last stage of this rank's pipeline; on other stages, only this rank.

        Both ends hold a table that the embedding and the head share.
        """
        return self._group("ends")

    def group(self, axis: str) -> ProcessGroup:
        """Returns this rank's c10d process group along an axis."""
        return self.axis(axis).process_group

    def neighbours(self, axis: str, count: int) -> AxisGroup:
        """Returns the group of this rank and its neighbours along an axis, `count` together.

        They are the ranks of the axis from a multiple of count on. All ranks of the grid must call
        it for the same groups in the same order; a group is made on first use.
        Raises ValueError if count does not divide the axis.
        """
        whole = self.axis(axis)
        if count < 1 or whole.size % count:
            raise ValueError(f"count must divide {axis}={whole.size}, got {count}")
        if count == whole.size:
            return whole
        key = (axis, count)
        if key not in self._groups:
            ranks = dist.get_process_group_ranks(whole.process_group)
            first = whole.rank - whole.rank % count
            self._groups[key] = self._group_of(axis, ranks[first : first + count])
        return self._groups[key]

    @property
    def device_type(self) -> str:
        """The type of device whose tensors the groups communicate: "cuda" over NCCL, else "cpu"."""
        return device_type(self.group("x"))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The grid as a DeviceMesh of torch, over the same groups; dims are named like the axes."""
        if self._mesh is None:
            groups = [self.group(axis) for axis in AXES]
            mesh = torch.arange(self.world_size).view([group.size() for group in groups])
            self._mesh = DeviceMesh.from_group(
                groups, device_type(groups[0]), mesh=mesh, mesh_dim_names=AXES
            )
        return self._mesh

    def num_parts(self, axes: Sequence[str]) -> int:
        """Returns the number of parts into which these axes split a dimension together."""
        return math.prod(self.size(axis) for axis in axes)

    def part(self, axes: Sequence[str]) -> int:
        """Returns the index of this rank's part among them; the first axis is the slowest."""
        index = 0
        for axis in axes:
            index = index * self.size(axis) + self.axis(axis).rank
        return index

    def local_block(self, full_sizes: Sequence[int], dims: Dims) -> tuple[list[int], list[int]]:
        """Returns (offsets, sizes) of this rank's block of a tensor that `dims` splits.

        Raises ValueError, with the numbers, if the axes do not divide a dimension.
        """
        offsets, sizes = [0] * len(full_sizes), list(full_sizes)
        for dim, axes in dims.items():
            _check_dim(dim, len(full_sizes))
            parts = self.num_parts(axes)
            if full_sizes[dim] % parts:
                raise ValueError(
                    f"dim {dim} of a tensor of shape {list(full_sizes)} must be divisible by "
                    f"{parts} (axes {', '.join(f'{axis}={self.size(axis)}' for axis in axes)})"
                )
            sizes[dim] = full_sizes[dim] // parts
            offsets[dim] = self.part(axes) * sizes[dim]
        return offsets, sizes

    def shard(self, full: Tensor, dims: Dims) -> Tensor:
        """Returns a copy of this rank's block of a whole tensor, without communication.

        `grid.shard(full, {0: ("data", "z", "x"), 1: ("y",)})`
        """
        offsets, sizes = self.local_block(full.shape, dims)
        block = full
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            block = block.narrow(dim, offset, size)
        return block.clone(memory_format=torch.contiguous_format)

    def unshard(self, local: Tensor, dims: Dims) -> Tensor:
        """Returns, on every rank, the whole tensor, given each rank's `shard(full, dims)`.

        Collectives: an all-gather over every axis of `dims`, fastest first. The result has no
        gradient.
        """
        whole = local.detach()
        for dim, axes in dims.items():
            _check_dim(dim, local.dim())
            for axis in reversed(tuple(axes)):
                group = self.axis(axis)
                if group.size > 1:
                    whole = torch.ops.axonn.all_gather(whole, dim, group.name, group.size, "auto")
        return whole


def axis_of(group_description: str) -> str | None:
    """Returns the axis of a c10d group, given its description; None if no Grid made the group."""
    match = re.fullmatch(rf"({'|'.join(AXES)}) \(ranks \d+(, \d+)*\)", group_description)
    return match[1] if match else None


def _nccl_options(patience: timedelta) -> Any:
    """Returns the options of an NCCL group; None for other backends.

    NCCL's streams get a high priority, since matmuls would otherwise take every SM that becomes
    free.
    """
    assert dist.group.WORLD is not None
    if device_type(dist.group.WORLD) != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = patience
    return options


def _describe(axis: str, ranks: Sequence[int]) -> str:
    """Returns the description of an axis's group, which c10d also shows in error messages."""
    return f"{axis} (ranks {', '.join(map(str, ranks))})"


def _check_dim(dim: int, num_dims: int) -> None:
    if not 0 <= dim < num_dims:
        raise ValueError(f"dim {dim} must be in [0, {num_dims})")
