"""Muon's step: the products and collectives that orthogonalise a rank's matrices.

Each rank of data orthogonalises its own matrices. The first one has the most; its work is described
here. Source: axonn_ext/optim/newton_schulz.py, whose head explains S, T, p, q, A and B, and
axonn_ext/optim/muon.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from axonn_ext.planner.step.parameters import elements_of
from axonn_ext.planner.step.rank import FP32, Rank, present
from axonn_ext.planner.step.tasks import Collective, Matmul, Task, Update
from axonn_ext.spec.buckets import whole_cuts
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import LinearSpec, ModelConfig
from axonn_ext.spec.optimizer import NEWTON_SCHULZ_STEPS
from axonn_ext.spec.parallel import ROLES

BF16 = 2  # bytes of an element of what is orthogonalised
# The bytes per element that a linear combination in fp32 of two bf16 blocks reads and writes: one
# is widened and multiplied, the other added, and the sum rounded.
_COMBINED = (BF16 + FP32) + 2 * FP32 + (2 * FP32 + BF16) + (FP32 + BF16)
# The same for momentum, of all matrices: the gradient is scaled, and averaged with the buffer.
_MOMENTUM = 2 * FP32 + 3 * FP32
# For applying an update: weight decay, and the sum.
_APPLIED = 2 * FP32 + (2 * FP32 + BF16)
# Before the iterations: Nesterov's mean, the cast, the norm and the division by it.
_BEGUN = 3 * FP32 + (FP32 + BF16) + BF16 + 2 * BF16


class Owned(NamedTuple):
    """What the first rank of data orthogonalises.

    counts   how many of each of a block's four matrices
    parts    the elements of a rank's part of each bucket (spec.buckets.whole_cuts)
    classes  the largest part of each size of matrix; buckets of all of these may be filled at once
    """

    counts: tuple[int, ...]
    parts: tuple[int, ...]
    classes: tuple[int, ...]


def owned_by(model: ModelConfig, grid: GridShape, num_layers: int) -> Owned:
    """Returns what the first rank of data orthogonalises of that many blocks."""
    sizes = tuple(elements_of(grid, linear) for linear in model.block_linears)
    return _owned(sizes, num_layers, grid.data)


@lru_cache(maxsize=4096)
def _owned(sizes: tuple[int, ...], num_layers: int, num_parts: int) -> Owned:
    order = sizes[::-1] * num_layers
    counts, parts = [0] * len(sizes), []
    for (first, *_), numel in whole_cuts(order, num_parts=num_parts):
        counts[-1 - first.number % len(sizes)] += 1
        parts.append(numel // num_parts)
    return Owned(tuple(counts), tuple(parts), tuple(sorted(set(parts))))


def matrix_elements(rank: Rank) -> int:
    """Returns the elements of all matrices of a rank's blocks that Muon updates."""
    linears = rank.model.block_linears
    return rank.share.num_layers * sum(elements_of(rank.job.grid, w) for w in linears)


def orthogonalisations(rank: Rank) -> tuple[tuple[tuple[Task, ...], int], ...]:
    """Returns the tasks that orthogonalise matrices, and how often each list of tasks runs."""
    counts = owned_by(rank.model, rank.job.grid, rank.share.num_layers).counts
    work: list[tuple[tuple[Task, ...], int]] = []
    for linear, count in zip(rank.model.block_linears, counts, strict=True):
        if count:
            work.append(((_norm(rank, linear),), count))
            work.append((_iteration(rank, linear), count * NEWTON_SCHULZ_STEPS))
    return tuple(work)


def matrix_bytes(rank: Rank) -> int:
    """Returns the bytes that momentum and updates read and write, without ZeRO."""
    casts = 0 if rank.width == FP32 else 2 * (rank.width + FP32)
    each = _MOMENTUM + _APPLIED + casts
    received = 3 * BF16 if rank.size["data"] > 1 else 0  # copied in and out of what is gathered
    return matrix_elements(rank) * (each + received)


def sent_updates(rank: Rank) -> Iterator[Collective]:
    """Yields the all-gathers over data of updates, without ZeRO, in slices of a bucket."""
    parts = owned_by(rank.model, rank.job.grid, rank.share.num_layers).parts
    at_once = max(1, rank.options.optimizer.bucket_elements // rank.size["data"])
    for part in parts:
        for start in range(0, part, at_once):
            numel = min(at_once, part - start)
            yield from present([rank.collective("all_gather", "data", numel, BF16, "updates")])


def matrix_sums(rank: Rank) -> Iterator[Collective]:
    """Yields the reduce-scatters over data of the buckets of matrices, with ZeRO."""
    for part in owned_by(rank.model, rank.job.grid, rank.share.num_layers).parts:
        numel = part * rank.num_parts
        yield from present(
            [rank.collective("reduce_scatter", "data", numel, rank.width, "gradients")]
        )


def matrix_updates(rank: Rank) -> tuple[Update, ...]:
    """Returns the updates of the buckets of matrices, with ZeRO."""
    width = rank.width
    each = _MOMENTUM + _APPLIED + (0 if width == FP32 else width + FP32) + FP32 + width
    return tuple(
        Update(
            part * each + 2 * part * rank.num_parts * width, 0, 0,
            rank.collective("all_gather", "data", part, width, "parameters"),
        )
        for part in owned_by(rank.model, rank.job.grid, rank.share.num_layers).parts
    )  # fmt: skip


class Mesh:
    """How a rank's blocks split a matrix; see axonn_ext.optim.newton_schulz.Mesh.

    sizes: of the axes. of_x, of_gram: the elements of a block of X, and of A or B.
    """

    def __init__(self, sizes: Mapping[str, int], linear: LinearSpec) -> None:
        r, s = ROLES[linear.role]
        rows, columns = (
            tuple(axis for axis in axes if sizes[axis] > 1) for axes in ((r, "z"), (s,))
        )
        tall = linear.n > linear.k
        self.short, self.long = (columns, rows) if tall else (rows, columns)
        self.size, longer = sorted((linear.n, linear.k))
        self.p, self.q = (prod(sizes[a] for a in axes) for axes in (self.short, self.long))
        self.padded = -(-self.size // self.q) * self.q
        self.height, self.width = self.size // self.p, longer // self.q
        self.of_x, self.of_gram = self.height * self.width, self.height * self.padded // self.q


def _norm(rank: Rank, linear: LinearSpec) -> Task:
    mesh = Mesh(rank.size, linear)
    sums = (rank.collective("all_reduce", a, 1, FP32, "updates") for a in (*mesh.short, *mesh.long))
    return Task("orthogonalise", before=present(sums), touched_bytes=mesh.of_x * _BEGUN)


def _iteration(rank: Rank, linear: LinearSpec) -> tuple[Task, ...]:
    """Returns the products A, A A and B X of one iteration."""
    mesh = Mesh(rank.size, linear)
    split = mesh.p * mesh.q > 1  # else addmm combines
    gather_x = _gathers(rank, mesh.short, mesh.of_x)
    gather_left = _gathers(rank, mesh.long, mesh.of_gram)
    gather_right = _gathers(rank, mesh.short, mesh.of_gram)
    return (
        Task(
            "Gram matrix", Matmul(mesh.height, mesh.size, mesh.width, "NT"), gather_x,
            _scatters(rank, mesh.long, mesh.height * mesh.padded),
        ),
        Task(
            "Gram matrix squared",
            Matmul(mesh.height, mesh.padded // mesh.q, mesh.size, "NN"),
            (*gather_left, *gather_right), touched_bytes=mesh.of_gram * _COMBINED * split,
        ),
        Task(
            "orthogonalise", Matmul(mesh.height, mesh.width, mesh.size, "NN"),
            (*gather_left, *gather_x), touched_bytes=mesh.of_x * _COMBINED * split,
        ),
    )  # fmt: skip


def _gathers(rank: Rank, axes: Sequence[str], numel: int) -> tuple[Collective, ...]:
    """Returns the all-gathers of a block over axes, slowest first, of which the fastest begins."""
    found = []
    for axis in reversed(axes):
        found.append(rank.collective("all_gather", axis, numel, BF16, "updates"))
        numel *= rank.size[axis]
    return present(found)


def _scatters(rank: Rank, axes: Sequence[str], numel: int) -> tuple[Collective, ...]:
    found = []
    for axis in axes:
        found.append(rank.collective("reduce_scatter", axis, numel, BF16, "updates"))
        numel //= rank.size[axis]
    return present(found)
