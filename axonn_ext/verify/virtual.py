"""Checks the fused GEMM on one GPU: by itself, and between virtual ranks that share the GPU.

Virtual ranks wait, signal and sum as real ranks do, but have no links between them. `cuda` is the
module axonn_ext._cuda. Every check raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from axonn_ext.verify.accuracy import check, check_same_bits

DTYPES = (torch.bfloat16, torch.float16)
# M, N, K of one rank's product: whole tiles, partial tiles, fewer rows than a tile, and a product
# large enough for several chunks and several rounds of tiles.
SHAPES = ((512, 512, 256), (264, 200, 136), (16, 64, 64), (2048, 1536, 1024))
# Whether each operand is transposed: BLAS's tn, nn and nt.
LAYOUTS = ((False, True), (False, False), (True, False))
ARRIVING = ("rows", "columns", "inner", "inner_a")
WORKSPACE = 64 << 20

Shape = tuple[int, int, int]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Returns normally distributed numbers on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


def stored(t: Tensor, transposed: bool) -> Tensor:
    """Returns the same values, stored by rows or by columns."""
    return t.t().contiguous().t() if transposed else t


def virtual_ranks(cuda: ModuleType, size: int) -> Any:
    """Returns that many virtual ranks on the current GPU."""
    return cuda.VirtualRanks(size, workspace_bytes=WORKSPACE)


# --- The plain product ----------------------------------------------------------------------------


def check_gemm(
    cuda: ModuleType,
    shape: Shape,
    dtype: torch.dtype,
    *,
    transposed: tuple[bool, bool],
    wait_chunks: int,
) -> None:
    """Checks a product that waits for that many flags, all already raised."""
    m, n, k = shape
    a = stored(draw(m, k, seed=1, dtype=dtype), transposed[0])
    b = stored(draw(k, n, seed=2, dtype=dtype), transposed[1])
    pad = torch.zeros(cuda.PAD_BYTES, dtype=torch.uint8, device="cuda")
    got = cuda.gemm(a, b, wait_chunks=wait_chunks, pad=pad)
    check(got, a.double() @ b.double(), a @ b)
    check_same_bits(cuda.gemm(a, b, wait_chunks=wait_chunks, pad=pad), got)


def check_bias_and_residual(cuda: ModuleType, dtype: torch.dtype) -> None:
    """Checks the bias and the residual that the epilogue adds."""
    a, b = draw(384, 256, seed=1, dtype=dtype), draw(256, 320, seed=2, dtype=dtype)
    bias, residual = draw(320, seed=3, dtype=dtype), draw(384, 320, seed=4, dtype=dtype)
    product = a.double() @ b.double()
    plain = a @ b
    check(cuda.gemm(a, b, bias=bias), product + bias, plain + bias)
    check(cuda.gemm(a, b, residual=residual), product + residual, plain + residual)
    both = cuda.gemm(a, b, bias=bias, residual=residual)
    check(both, product + bias + residual, plain + bias + residual)


# --- Virtual ranks --------------------------------------------------------------------------------


def gathered(
    size: int, shape: Shape, arriving: str, dtype: torch.dtype, *, seed: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Returns each rank's shard, other operand, and product, in float64 and by torch."""
    m, n, k = shape
    is_a = arriving in ("rows", "inner_a")
    others = [draw(*((k, n) if is_a else (m, k)), seed=seed + r, dtype=dtype) for r in range(size)]
    whole = {"rows": (m, k), "columns": (n, k), "inner": (k, n), "inner_a": (k, m)}[arriving]
    shards = list(draw(*whole, seed=seed + 99, dtype=dtype).chunk(size))
    rows = torch.cat(shards)

    def product(other: Tensor, cast: Callable[[Tensor], Tensor]) -> Tensor:
        gathered = rows.t() if arriving in ("columns", "inner_a") else rows
        return cast(gathered) @ cast(other) if is_a else cast(other) @ cast(gathered)

    want = [product(other, Tensor.double) for other in others]
    torchs = [product(other, lambda t: t) for other in others]
    return shards, others, want, torchs


def check_gather(
    cuda: ModuleType, size: int, shape: Shape, dtype: torch.dtype, *, arriving: str
) -> None:
    """Checks each rank's product with a gathered operand. A second call must give the same bits."""
    shards, others, want, torchs = gathered(size, shape, arriving, dtype, seed=7)
    virtual = virtual_ranks(cuda, size)
    got = virtual.all_gather_matmul(shards, others, arriving=arriving)
    again = virtual.all_gather_matmul(shards, others, arriving=arriving)
    for mine, repeated, right, plain in zip(got, again, want, torchs, strict=True):
        check(mine, right, plain)
        check_same_bits(repeated, mine)


def is_summable(size: int, shape: Shape, transposed: tuple[bool, bool]) -> bool:
    """Whether kernels can load each destination's rows, given their address in a transposed A."""
    return not transposed[0] or shape[0] // size % 8 == 0


def summands(
    size: int,
    shape: Shape,
    dtype: torch.dtype,
    transposed: tuple[bool, bool] = (False, False),
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns A and B of each rank."""
    m, n, k = shape
    ranks = range(seed, seed + size)
    a = [stored(draw(m, k, seed=r, dtype=dtype), transposed[0]) for r in ranks]
    b = [stored(draw(k, n, seed=50 + r, dtype=dtype), transposed[1]) for r in ranks]
    return a, b


def check_sum(
    cuda: ModuleType,
    size: int,
    shape: Shape,
    dtype: torch.dtype,
    *,
    transposed: tuple[bool, bool],
    everywhere: bool,
) -> None:
    """Checks the sum of the ranks' products, or each rank's rows of it.

    A second call must give the same bits.
    """
    m = shape[0]
    a, b = summands(size, shape, dtype, transposed)
    want = torch.stack([x.double() @ y.double() for x, y in zip(a, b, strict=True)]).sum(0)
    plain = torch.zeros_like(want, dtype=dtype)
    for x, y in zip(a, b, strict=True):
        plain += x @ y
    virtual = virtual_ranks(cuda, size)
    got = virtual.matmul_sum(a, b, everywhere=everywhere)
    again = virtual.matmul_sum(a, b, everywhere=everywhere)
    for rank, (first, second) in enumerate(zip(got, again, strict=True)):
        check_same_bits(second, first)
        part = slice(None) if everywhere else slice(rank * m // size, (rank + 1) * m // size)
        check(first, want[part], plain[part], parts=size)
        if everywhere:
            check_same_bits(first, got[0])


def check_sum_broadcasts(cuda: ModuleType, size: int, shape: Shape, dtype: torch.dtype) -> None:
    """Checks that the bits do not depend on how sums are sent to all ranks."""
    a, b = summands(size, shape, dtype)
    virtual = virtual_ranks(cuda, size)
    want = virtual.matmul_sum(a, b, everywhere=True, sum_broadcast="copy_engine")
    for way in ("peer_stores", "auto", "any_order"):  # one GPU has no switch to add
        for mine in virtual.matmul_sum(a, b, everywhere=True, sum_broadcast=way):
            check_same_bits(mine, want[0])


def check_calls_keep_apart(
    cuda: ModuleType,
    num_calls: int,
    *,
    sum_broadcasts: Sequence[str] = ("copy_engine", "peer_stores"),
) -> None:
    """Checks that no call reads what another wrote, or writes what another reads.

    Calls of all kinds run on ranks that wait only for each other's flags, with random delays.
    """
    size, dtype = 4, torch.bfloat16
    virtual = virtual_ranks(cuda, size)
    calls: list[Callable[[], list[Tensor]]] = []
    for seed, shape in enumerate([(512, 512, 256), (256, 1024, 128), (1024, 256, 512)]):
        for arriving in ("rows", "columns", "inner"):
            shards, others, _, _ = gathered(size, shape, arriving, dtype, seed=100 * seed)
            calls.append(partial(virtual.all_gather_matmul, shards, others, arriving=arriving))
        a, b = summands(size, shape, dtype, seed=seed)
        for everywhere, way in ((False, "auto"), *((True, way) for way in sum_broadcasts)):
            add = partial(virtual.matmul_sum, a, b, everywhere=everywhere, sum_broadcast=way)
            calls.append(add)
    first = [call() for call in calls]
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(len(calls), (num_calls,), generator=generator).tolist()
    # Each call delays ranks by up to about a millisecond; ranks are enqueued in random order.
    virtual.run_apart(max_delay_cycles=2_000_000, seed=1)
    results = [calls[index]() for index in order]
    virtual.join()
    for index, result in zip(order, results, strict=True):
        for mine, before in zip(result, first[index], strict=True):
            check_same_bits(mine, before)
