"""The products of a Linear in forward and backward, and the collectives of its ranks."""

from __future__ import annotations

from axonn_ext.planner.step.rank import FP32, Rank, present
from axonn_ext.planner.step.tasks import Collective, Matmul, Task
from axonn_ext.spec.model import LinearSpec
from axonn_ext.spec.parallel import ROLES


def collective_of_weight(rank: Rank, linear: LinearSpec, kind: str) -> Collective | None:
    """Returns the gather of a weight over z, or the reduce-scatter of its gradient, by `kind`."""
    block = whole_elements(rank, linear)
    if kind == "all_gather":
        return rank.collective(kind, "z", block // rank.size["z"], rank.width, "weights")
    return rank.collective(kind, "z", block, rank.width, "gradients")


def whole_elements(rank: Rank, linear: LinearSpec) -> int:
    """Returns the number of elements of a rank's weight after the gather over z."""
    r, s = ROLES[linear.role]
    return linear.n * linear.k // (rank.size[r] * rank.size[s])


def linear_forward(rank: Rank, linear: LinearSpec, *, gathers: bool = True) -> Task:
    """Returns the forward task. gathers: the task gathers the weight itself."""
    r, s = ROLES[linear.role]
    n, k = linear.n // rank.size[r], linear.k // rank.size[s]
    before = _gather_rows(rank, r, k)
    after = rank.collective(rank.sums, s, rank.m * n, rank.width, "activations")
    return Task(
        linear.name, Matmul(rank.m, n, k, "NT"), before, present([after]),
        gather=collective_of_weight(rank, linear, "all_gather") if gathers else None,
    )  # fmt: skip


def linear_backward(
    rank: Rank, linear: LinearSpec, *, gathers: bool = True, scatters: bool = True
) -> tuple[Task, Task]:
    """Returns dgrad and wgrad.

    gathers: the tasks gather the weight themselves. scatters: they also scatter its gradient.
    """
    r, s = ROLES[linear.role]
    n, k = linear.n // rank.size[r], linear.k // rank.size[s]
    kept = not rank.options.reshard_after_forward and rank.options.overlap is None
    regather = rank.options.sharded and not rank.options.save_gathered
    # A weight gradient that is deferred gathers dy once more.
    before = _gather_rows(rank, s, n) if rank.defers else ()
    after = rank.collective(rank.sums, r, rank.m * k, rank.width, "activations")
    dgrad = Task(
        f"{linear.name} dgrad", Matmul(rank.m, k, n, "NN"), _gather_rows(rank, s, n),
        present([after]),
        gather=collective_of_weight(rank, linear, "all_gather") if gathers and not kept else None,
    )  # fmt: skip
    wgrad = Task(
        f"{linear.name} wgrad", Matmul(n, k, rank.m, "TN"),
        (*before, *_gather_rows(rank, r, k)) if regather else before,
        scatter=collective_of_weight(rank, linear, "reduce_scatter") if scatters else None,
        touched_bytes=summed_bytes(rank, linear) if scatters else 0,
    )  # fmt: skip
    return dgrad, wgrad


def summed_bytes(rank: Rank, linear: LinearSpec) -> int:
    """Returns the bytes touched when the blocks of a gradient that arrive over z are added.

    This counts only with overlap, where the blocks are added in fp32 after they have arrived;
    the ops add them while they communicate.
    """
    if rank.options.overlap is None or rank.size["z"] == 1:
        return 0
    return whole_elements(rank, linear) * (rank.width + 2 * FP32)


def _gather_rows(rank: Rank, axis: str, features: int) -> tuple[Collective, ...]:
    """Returns the gather of all m rows, which are scattered over the axis in `sharded`."""
    if not rank.options.sharded:
        return ()
    shard = rank.m // rank.size[axis] * features
    return present([rank.collective("all_gather", axis, shard, rank.width, "activations")])
