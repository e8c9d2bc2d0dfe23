"""The workspaces of the fused ops on GPUs, which stay until the end of a run.

Each group has one, as large as its largest call needs. Products are summed over x and y, weight
gradients over z. Operands that are gathered during a product never need a larger workspace: a
gathered input is as large as its gradient before the sum, and so is a gathered weight.

Sources: csrc/ops/composed/linear_forward.cpp, linear_backward.cpp; csrc/core/cuda/fused,
fused_calls.cpp and workspace_size.h.
"""

from __future__ import annotations

from collections.abc import Iterator

from axonn_ext.planner.memory.stage import Stage
from axonn_ext.spec.parallel import ROLES

_FRONT_BYTES, _PAGE_BYTES = 132096, 2 << 20  # of workspace_size.h
_STEPS_PER_DOUBLING = 8


def workspaces(stage: Stage) -> int:
    """Returns the bytes of a rank's workspaces of all groups; 0 if no op may be fused."""
    largest: dict[str, int] = {}
    for axis, elements in _calls(stage):
        largest[axis] = max(elements, largest.get(axis, 0))
    return sum(memory_bytes(elements * stage.width) for elements in largest.values())


def _calls(stage: Stage) -> Iterator[tuple[str, int]]:
    """Yields the axis of each fused call of a step, and the elements of its workspace."""
    if not stage.may_fuse:
        return
    model, size = stage.job.placed_model, stage.job.grid.as_dict()
    # A reduce-scatter needs the whole product. So does an all-reduce, and as much for the sums.
    sums = stage.m if stage.sharded else 2 * stage.m
    for linear in (*model.block_linears, *((model.head,) if stage.share.has_last else ())):
        r, s = ROLES[linear.role]
        n, k = linear.n // size[r], linear.k // size[s]
        # With overlap, the orchestrator gathers weights. A tied table is gathered separately.
        is_gathered = stage.overlap is not None or (linear is model.head and model.tie_embeddings)
        for axis, elements in ((s, sums * n), (r, sums * k), ("z", 0 if is_gathered else n * k)):
            if size[axis] > 1 and elements:
                yield axis, elements


def memory_bytes(num_bytes: int) -> int:
    """Returns the memory of a workspace that must hold num_bytes, including its flags.

    It grows in steps of an eighth of its size, and of at least a page.
    """
    if num_bytes + _FRONT_BYTES <= _PAGE_BYTES:
        return _PAGE_BYTES
    doubling = 1 << num_bytes.bit_length() - 1
    step = max(doubling // _STEPS_PER_DOUBLING, _PAGE_BYTES)
    return _FRONT_BYTES + -(-num_bytes // step) * step
