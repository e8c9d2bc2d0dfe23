"""The planner's number of communicators is the number that ranks make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from axonn_ext import Grid
from axonn_ext.pipeline.gpu_channels import steps
from axonn_ext.ranks.communicators import Communicators
from axonn_ext.spec.communicators import num_communicators
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.parallel import Overlap
from fake_communicators import FakeLibrary
from worker_pool import WorkerPool


def made_for(shape: GridShape, own: bool, wraps: bool) -> int:
    """The number of groups of several ranks that a rank makes, including NCCL's for messages."""
    names = dist.distributed_c10d._world.pg_names
    before, library = set(names), FakeLibrary()
    with Grid(**shape.as_dict()) as grid:
        count = sum(group.size() > 1 for group in set(names) - before)
        if own:
            axes = grid.communicators._axes
            Communicators(axes, library=library).get(torch.device("cuda", 0), required=True)
            count += sum(1 + len(axes) for _, axes, _ in library.made)
        if shape.pipe > 1:
            ranks = dist.get_process_group_ranks(grid.group("pipe"))
            count += sum(s.is_used for s in steps(grid.coords["pipe"], ranks, wraps=wraps))
    return count


@pytest.mark.parametrize(
    "shape",
    [
        GridShape(), GridShape(x=2), GridShape(pipe=2), GridShape(x=2, data=2), GridShape(y=2, z=2),
        GridShape(z=2, pipe=2), GridShape(pipe=4), GridShape(2, 2, 2), GridShape(x=2, pipe=4),
        GridShape(x=2, data=2, pipe=2),
    ],
)  # fmt: skip
def test_as_many_as_ranks_make(pool: Callable[[int], WorkerPool], shape: GridShape) -> None:
    for own, wraps in ((True, False), (True, True), (False, False)):
        overlap = Overlap() if own else Overlap(communicators="c10d")
        counted = num_communicators(shape, overlap=overlap, wraps=wraps)
        assert max(pool(shape.size).run(made_for, shape, own, wraps)) == counted
