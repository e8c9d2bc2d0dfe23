"""The parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_ext.planner.job import Job
from axonn_ext.planner.shares import StageShare, share_of
from axonn_ext.planner.step.rank import Rank
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import LinearSpec, ModelConfig
from axonn_ext.spec.parallel import ROLES


def parameters_by_axes(rank: Rank) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields this rank's elements of each parameter, in the model's order, and the axes over
    which its gradient must be summed after backward."""
    model, size = rank.model, rank.size
    rows = ("x", "z", "data") if rank.options.sharded else ("z", "data")
    norm = [(model.hidden_size // size["y"], rows)] * model.traits.norm.num_vectors
    of_heads = ("x", "y", "z", "data") if rank.options.sharded else ("x", "z", "data")
    head_norms = [(model.head_dim, of_heads)] * (2 * model.traits.has_head_norms)
    table = (elements_of(rank, model.head), ("data",))
    has_first, has_last = rank.share.has_first, rank.share.has_last
    if has_first or (has_last and model.tie_embeddings):
        yield table
    if has_first and model.num_positions:
        yield model.num_positions * model.hidden_size // size["y"], rows
    qkv, out, up, down = (list(_linear_parameters(rank, w)) for w in model.block_linears)
    for _ in range(rank.share.num_layers):
        yield from (*norm, *qkv, *out, *head_norms, *norm, *up, *down)
    if has_last:
        yield from norm
        if not model.tie_embeddings:
            yield table


def _linear_parameters(rank: Rank, linear: LinearSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    yield elements_of(rank, linear), ("data",)
    if linear.bias:
        yield linear.n // rank.size[ROLES[linear.role][0]], ("z", "data")


def elements_of(rank: Rank, linear: LinearSpec) -> int:
    """Returns the elements of a rank's shard of a weight."""
    return linear.n * linear.k // (rank.size["x"] * rank.size["y"] * rank.size["z"])


def parameters_of_rank(job: Job, stage: int = 0) -> int:
    """Returns the elements of the parameters that each rank of a pipe coordinate holds."""
    return parameters_of_share(job.model, job.grid, share_of(job, stage))


def parameters_of_share(model: ModelConfig, grid: GridShape, share: StageShare) -> int:
    """Returns the elements of the parameters that each rank with that share holds."""
    vectors = (2 * share.num_layers + share.has_last) * model.traits.norm.num_vectors
    vectors += model.num_positions * share.has_first  # each has H elements
    block = sum(w.n * w.k for w in model.block_linears)
    tables = share.has_first + share.has_last
    if model.tie_embeddings:
        tables = min(tables, 1)
    biases = sum(w.n // getattr(grid, ROLES[w.role][0]) for w in model.block_linears if w.bias)
    matrices = share.num_layers * block + tables * model.head.n * model.head.k
    return (
        matrices // (grid.x * grid.y * grid.z)
        + share.num_layers * (biases + model.head_norm_size)
        + vectors * model.hidden_size // grid.y
    )
