"""Newton-Schulz orthogonalisation of a matrix that x, y and z split, by matmuls of its blocks.

Legend: a matrix [N, K] with S = min(N, K) and T = max(N, K) is read as X [S, T], transposed if
N > K. The axes `short` split S into p parts, the axes `long` split T into q parts, and P = p q.

    X  [S / p, T / q]    the matrix         A, B  [S / p, S / q]    A = X X^T, B = b A + c A A

An iteration is X <- a X + B X. Each of its three products costs a rank 1 / P of the whole one:

    A    reduce_scatter_long(X @ all_gather_short(X)^T)
    A A  all_gather_long(A) @ all_gather_short(A)
    B X  all_gather_long(B) @ all_gather_short(X)

One gather of each product, or the sum where nothing splits S, goes through a fused op; of two axes
that split one dimension, the slower one. A rank keeps 1 / P of X, A and B. For a product it gathers
at most 1 / p of A or B, or X over the faster axis; what the fused op gathers is read in place on
CPUs, and elsewhere is 1 / q of X, A or B. So no rank holds a whole matrix that x and y both split.
Where q does not divide S, columns of zeros are added to A and B.

Sources: Jordan et al., Muon, 2024 (https://kellerjordan.github.io/posts/muon/), for the iteration;
torch.optim.Muon, whose roundings are followed; van de Geijn and Watts, SUMMA, 1997, for products of
blocks on a mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import AxisGroup, Dims, Grid
from axonn_ext.spec.optimizer import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # the least norm that a matrix is divided by


@dataclass(frozen=True)
class Mesh:
    """How the grid splits a matrix [N, K].

    short, long: the axes of several ranks that split the shorter and the longer dimension, slowest
    first. size: of the shorter dimension. transposed: whether that is K, N > K.
    """

    short: tuple[AxisGroup, ...]
    long: tuple[AxisGroup, ...]
    size: int
    transposed: bool
    algorithm: str

    @classmethod
    def of(cls, grid: Grid, sizes: Sequence[int], dims: Dims, *, algorithm: str = "auto") -> Mesh:
        """Returns the mesh of a matrix; dims: as in `Grid.shard`."""
        rows, columns = (
            tuple(grid.axis(a) for a in dims.get(dim, ()) if grid.size(a) > 1) for dim in (0, 1)
        )
        if sizes[0] > sizes[1]:
            return cls(columns, rows, sizes[1], True, algorithm)
        return cls(rows, columns, sizes[0], False, algorithm)

    @property
    def padding(self) -> int:
        """The columns of zeros that A and B need so that the axes `long` divide them."""
        parts = 1
        for axis in self.long:
            parts *= axis.size
        return -self.size % parts


@torch.no_grad()
def orthogonalised(block: Tensor, mesh: Mesh, *, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Returns this rank's block of the matrix whose singular values Newton-Schulz has made about 1.

        block   [N / Gr, K / Gc]   this rank's block, in rows over Gr ranks and columns over Gc
        result  [N / Gr, K / Gc]   likewise, in the block's dtype

    As in torch, the matrix is first divided by its Frobenius norm, rounded to the dtype. Local
    products accumulate in fp32 and are rounded to the dtype; sums over ranks accumulate in fp32,
    as the fused ops say, and so do the linear combinations (fp64 for fp64).

    Collectives: an all-reduce of one fp32 number over each axis that splits the matrix; for each
    step, those in the head of this module. All ranks of these axes must call it for the same
    matrices in the same order.
    """
    x = block.t() if mesh.transposed else block
    x = x / _norm(x, mesh).to(x.dtype).clamp(min=EPS)
    if mesh.short or mesh.long:
        x = x.contiguous()
    for _ in range(steps):
        x = _iteration(x, mesh)
    return x.t() if mesh.transposed else x


def _norm(x: Tensor, mesh: Mesh) -> Tensor:
    """Returns the Frobenius norm of the whole matrix, accumulated in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dtype=wide).square().view(1)
    for axis in (*mesh.short, *mesh.long):
        square = collectives.all_reduce(square, axis, algorithm=mesh.algorithm)
    return square.sqrt().view(())


def _iteration(x: Tensor, mesh: Mesh) -> Tensor:
    a, b, c = COEFFICIENTS
    if not (mesh.short or mesh.long):  # bitwise as torch.optim.Muon
        gram = x @ x.t()
        return torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    gram = _gram(x, mesh)
    update = _combined(gram, b, _times(gram, gram, mesh), c)
    return _combined(x, a, _times(update, x, mesh), 1.0)


def _combined(one: Tensor, factor: float, other: Tensor, other_factor: float) -> Tensor:
    """Returns factor * one + other_factor * other, rounded once."""
    wide = torch.promote_types(one.dtype, torch.float32)
    return other.to(wide).mul_(other_factor).add_(one, alpha=factor).to(one.dtype)


def _gram(x: Tensor, mesh: Mesh) -> Tensor:
    """Returns this rank's block of X X^T, [S / p, S / q].

    Collectives: an all-gather of x over `short`, and a reduce-scatter over `long`.
    """
    if not mesh.short:
        rows = F.pad(x, (0, 0, 0, mesh.padding)) if mesh.padding else x
        first, *rest = mesh.long
        part = torch.ops.axonn.matmul_reduce_scatter(
            x, rows.t(), 1, first.name, first.size, mesh.algorithm
        )
    else:
        first, *others = mesh.short
        rows = _gathered(x, others, mesh, dim=0)
        part = torch.ops.axonn.matmul_all_gather_rhs(
            x, rows.t(), 1, first.name, first.size, mesh.algorithm
        )
        part = F.pad(part, (0, mesh.padding)) if mesh.padding else part
        rest = list(mesh.long)
    for axis in rest:
        part = collectives.reduce_scatter(part, axis, dim=1, algorithm=mesh.algorithm)
    return part


def _times(left: Tensor, right: Tensor, mesh: Mesh) -> Tensor:
    """Returns this rank's block of left @ right.

        left [S / p, S / q]   right [S / p, n / q]   result [S / p, n / q]

    Collectives: an all-gather of left over `long`, and one of right over `short`.
    """
    if mesh.short:
        rows = _gathered(left, mesh.long, mesh, dim=1)
        if mesh.padding:
            rows = rows[:, : mesh.size].contiguous()
        first, *others = mesh.short
        part = _gathered(right, others, mesh, dim=0)
        return torch.ops.axonn.matmul_all_gather_rhs(
            rows, part, 0, first.name, first.size, mesh.algorithm
        )
    right = F.pad(right, (0, 0, 0, mesh.padding)) if mesh.padding else right
    first, *others = mesh.long
    part = _gathered(left, others, mesh, dim=1)
    return torch.ops.axonn.all_gather_matmul(part, right, 1, first.name, first.size, mesh.algorithm)


def _gathered(x: Tensor, axes: Sequence[AxisGroup], mesh: Mesh, *, dim: int) -> Tensor:
    """Returns x gathered along `dim` over axes, slowest first."""
    for axis in reversed(axes):
        x = collectives.all_gather(x, axis, dim=dim, algorithm=mesh.algorithm)
    return x
