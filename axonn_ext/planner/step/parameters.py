"""The parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.step.rank import Rank
from axonn_ext.planner.step.stage_models import StageShare, share_of
from axonn_ext.spec.buckets import BucketSizes, aligned, bucket_sizes
from axonn_ext.spec.family import BLOCK_NORMS
from axonn_ext.spec.grid import SUM_ORDER, GridShape
from axonn_ext.spec.model import LinearSpec, ModelConfig
from axonn_ext.spec.parallel import ROLES, ParallelConfig


class Gradient(NamedTuple):
    """The gradient of a parameter.

    axes     the axes over which it must be summed after backward, on any grid
    on_ends  the first and the last stage of a pipeline both hold the parameter
    in_block whether it is that of a Linear's weight in a block, which Muon updates
    """

    elements: int
    axes: tuple[str, ...]
    on_ends: bool = False
    in_block: bool = False


def parameters_by_axes(rank: Rank) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields this rank's elements of each parameter, in the model's order, and the axes over
    which its gradient must be summed after backward."""
    for gradients, times in _gradients(rank.model, rank.job.grid, rank.share, rank.options):
        yield from [(gradient.elements, gradient.axes) for gradient in gradients] * times


class Group(NamedTuple):
    """Gradients that share buckets, because they are summed alike.

    axes      the axes of several ranks over which they must be summed before the data axis
    elements  their total on a rank, with the gaps that `spec.buckets.aligned` leaves
    """

    axes: tuple[str, ...]
    elements: int


def groups_of(
    model: ModelConfig, grid: GridShape, share: StageShare, parallel: ParallelConfig, *, muon: bool
) -> list[Group]:
    """Returns the gradients of a rank with that share, as `axonn_ext.optim.zero` groups them.

    muon: without those that Muon updates, which have buckets of their own (step/muon.py).
    """
    found: dict[tuple[tuple[str, ...], bool], int] = {}
    for gradients, times in _gradients(model, grid, share, parallel):
        for gradient in gradients:
            if muon and gradient.in_block:
                continue
            before = (a for a in SUM_ORDER if a in gradient.axes and a != "data")
            key = tuple(a for a in before if getattr(grid, a) > 1), gradient.on_ends
            found[key] = found.get(key, 0) + times * aligned(gradient.elements)
    return [Group(axes, elements) for (axes, _), elements in found.items()]


def buckets_of_groups(
    groups: Sequence[Group], elements: int, num_parts: int
) -> list[tuple[tuple[str, ...], BucketSizes]]:
    """Returns the axes over which gradients are summed before data, and the sizes of their buckets.

    Without ZeRO (num_parts = 1) the buckets are those of offload, which all parameters share.
    """
    if num_parts == 1:
        groups = [Group((), sum(group.elements for group in groups))]
    return [
        (g.axes, bucket_sizes(g.elements, elements=elements, num_parts=num_parts)) for g in groups
    ]


def _gradients(
    model: ModelConfig, grid: GridShape, share: StageShare, parallel: ParallelConfig
) -> Iterator[tuple[list[Gradient], int]]:
    """Yields gradients in the model's order, each list with its number of repetitions."""
    rows = ("x", "z", "data") if parallel.sharded else ("z", "data")
    norm = [Gradient(model.hidden_size // grid.y, rows)] * model.traits.norm.num_vectors
    qk_norms = qk_norms_of(model, grid, parallel)
    tied = model.tie_embeddings
    table = [Gradient(elements_of(grid, model.head), ("data",), tied and grid.pipe > 1)]
    if share.has_first or (share.has_last and tied):
        yield table, 1
    if share.has_first and model.num_positions:
        yield [Gradient(model.num_positions * model.hidden_size // grid.y, rows)], 1
    qkv, out, up, down = (_of_linear(grid, w) for w in model.block_linears)
    of = {name: norm * (name in model.traits.norms) for name in BLOCK_NORMS}
    attention, mlp = [*qkv, *out, *qk_norms], [*up, *down]
    yield (
        [*of["norm_1"], *attention, *of["after_1"], *of["norm_2"], *mlp, *of["after_2"]],
        share.num_layers,
    )
    if share.has_last:
        yield norm, 1
        if not tied:
            yield table, 1


def qk_norms_of(model: ModelConfig, grid: GridShape, parallel: ParallelConfig) -> list[Gradient]:
    """Returns the gradients of a block's norms of queries and of keys, if it has them."""
    splits_rows = ("y",) if parallel.sharded and not parallel.heads_over_y else ()
    if model.traits.qk_norm == "all":  # split as the heads are
        parts = grid.x * (grid.y if parallel.heads_over_y else 1)
        axes = (*splits_rows, "z", "data")
        return [Gradient(size // parts, axes) for size in model.qk_norm_sizes]
    of_heads = ("x", "y", "z", "data") if parallel.sharded else ("x", "z", "data")
    return [Gradient(size, of_heads) for size in model.qk_norm_sizes]


def _of_linear(grid: GridShape, linear: LinearSpec) -> list[Gradient]:
    weight = Gradient(elements_of(grid, linear), ("data",), in_block=True)
    if not linear.bias:
        return [weight]
    return [weight, Gradient(linear.n // getattr(grid, ROLES[linear.role][0]), ("z", "data"))]


def elements_of(grid: GridShape, linear: LinearSpec) -> int:
    """Returns the elements of a rank's shard of a weight."""
    return linear.n * linear.k // (grid.x * grid.y * grid.z)


def parameters_of_rank(job: Job, stage: int = 0) -> int:
    """Returns the elements of the parameters that each rank of a pipe coordinate holds."""
    return parameters_of_share(job.placed_model, job.grid, share_of(job, stage), job.options)


def parameters_of_share(
    model: ModelConfig, grid: GridShape, share: StageShare, parallel: ParallelConfig
) -> int:
    """Returns the elements of the parameters that each rank with that share holds."""
    norms = len(model.traits.norms) * share.num_layers + share.has_last
    vectors = norms * model.traits.norm.num_vectors
    vectors += model.num_positions * share.has_first  # each has H elements
    block = sum(w.n * w.k for w in model.block_linears)
    tables = share.has_first + share.has_last
    if model.tie_embeddings:
        tables = min(tables, 1)
    biases = sum(w.n // getattr(grid, ROLES[w.role][0]) for w in model.block_linears if w.bias)
    matrices = share.num_layers * block + tables * model.head.n * model.head.k
    return (
        matrices // (grid.x * grid.y * grid.z)
        + share.num_layers * (biases + sum(n.elements for n in qk_norms_of(model, grid, parallel)))
        + vectors * model.hidden_size // grid.y
    )
