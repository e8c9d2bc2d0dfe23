"""Independent facts about the matmul ops: their communication, and the bits of "fused".

axonn_ext.verify.ranks has their results in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)

# --- Fixed-order references: a rank's result to the last bit, from the inputs of all ranks --------


def in_order(addends: list[Tensor]) -> Tensor:
    """The sum in rank order, accumulated in fp32 (fp64 for fp64)."""
    wide = torch.float64 if addends[0].dtype == torch.float64 else torch.float32
    total = addends[0].to(wide)
    for addend in addends[1:]:
        total = total + addend.to(wide)
    return total.to(addends[0].dtype)


def sum_of_products(lefts: list[Tensor], rights: list[Tensor], gathered: int) -> Tensor:
    """sum_i lefts[i] @ rights[i] as the ops compute it if the inner dimension arrives in parts.

    gathered: number of elements of the whole gathered factor. The ops concatenate the parts for
    bfloat16 and float16, and if copying them costs less than adding each part to the product.
    """
    product = lefts[0].shape[0] * rights[0].shape[1]
    if lefts[0].dtype in LOW_PRECISION or 2 * gathered // len(lefts) < 2 * product:
        return torch.cat(lefts, 1) @ torch.cat(rights, 0)
    total = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return total


def all_gather_matmul(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    shards, b, world = [a for a, _ in inputs], inputs[rank][1], len(inputs)
    if dim == 0:
        if 2 * shards[0].numel() < b.numel():  # copying a part costs less than packing b again
            return torch.cat(shards) @ b
        return torch.cat([shard @ b for shard in shards])
    return sum_of_products(shards, list(b.chunk(world, 0)), world * shards[0].numel())


def matmul_all_gather_rhs(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    a, shards, world = inputs[rank][0], [b for _, b in inputs], len(inputs)
    if dim == 1:
        if 2 * shards[0].numel() < a.numel():
            return a @ torch.cat(shards, 1)
        return torch.cat([a @ shard for shard in shards], 1)
    return sum_of_products(list(a.chunk(world, 1)), shards, world * shards[0].numel())


def rows_of_product(a: Tensor, b: Tensor, world: int) -> list[Tensor]:
    """Every rank's rows of a @ b, split as by tensor_split; with many rows, one matmul per rank."""
    if a.shape[0] < world * 512:
        return list((a @ b).tensor_split(world))
    return [rows @ b for rows in a.tensor_split(world)]


def matmul_reduce_scatter(inputs: list[tuple[Tensor, ...]], rank: int, dim: int) -> Tensor:
    if dim == 0:
        return in_order([rows_of_product(a, b, len(inputs))[rank] for a, b in inputs])
    return in_order([a @ b.chunk(len(inputs), 1)[rank] for a, b in inputs])


def matmul_all_reduce(inputs: list[tuple[Tensor, ...]], rank: int) -> Tensor:
    products = [torch.cat(rows_of_product(a, b, len(inputs))) for a, b in inputs]
    return in_order(products)


# --- The ops --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The communication of an op.

    moved   two of M, K and N: the sizes of the whole matrix that is gathered or summed; ranks must
            agree on them
    issued  the collectives of forward, of da and of db; if the gradients need any, ranks must agree
            on which gradients they compute
    fused   the fixed-order reference of "fused"
    """

    moved: str
    issued: tuple[str, ...]
    fused: Callable[..., Tensor]


GATHER, SCATTER = "all_gather", "reduce_scatter"
MATMULS = {
    "all_gather_matmul": Facts("MK", (GATHER, SCATTER, GATHER), all_gather_matmul),
    "matmul_all_gather_rhs": Facts("KN", (GATHER, GATHER, SCATTER), matmul_all_gather_rhs),
    "matmul_reduce_scatter": Facts("MN", (SCATTER, GATHER, GATHER), matmul_reduce_scatter),
    "matmul_all_reduce": Facts("MN", ("all_reduce",), matmul_all_reduce),
}


def sizes_moved(op: str, m: int, k: int, n: int) -> tuple[int, ...]:
    """The sizes that `moved` names, among M, K and N."""
    sizes = {"M": m, "K": k, "N": n}
    return tuple(sizes[letter] for letter in MATMULS[op].moved)
