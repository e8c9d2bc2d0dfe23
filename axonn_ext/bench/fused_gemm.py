"""Compares the time of the fused GEMM, without any communication or waits, with torch.mm."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonn_ext import _library
from axonn_ext.bench.link_overlap import MAX_DIFFERENCE, parse_sizes, time_us
from axonn_ext.bench.results import content_of
from axonn_ext.calibrate.shapes import is_published, published_shapes
from axonn_ext.calibrate.this_machine import describe_machine
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.rows import RowsFile

# BLAS's names of the layouts of y = x @ weight.t(), dx = dy @ weight, dweight = dy.t() @ x.
LAYOUTS = {"tn": (False, True), "nn": (False, False), "nt": (True, False)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAIT_CHUNKS = 4
DESCRIPTION = """\
On one GPU of sm_90: A [M, K] @ B [K, N] by torch.mm (cuBLAS), by the kernel of "fused" without
waits, and by the same kernel as if A came in 16 chunks, all of which are there. What the second
costs over the first is our kernel; what the third costs over the second is waiting. At the end: the
least speed of both over M >= 2048, below which auto has other kernels. SHAPE is M,N,K, "published"
(MLPs of models from 7B to 405B) or published:M,M,... for some of its M."""
# With fewer rows, tiles of 128 rows leave most of the GPU idle, and another kernel is chosen.
LEAST_ROWS = 2048
LEAST_OF_TORCH, LEAST_OF_FUSED = 0.97, 0.99


@dataclass(frozen=True)
class GemmRow:
    """The times of one product, as medians in microseconds."""

    op: str
    shape: dict[str, int]
    dtype: str
    layout: str
    torch_us: float
    fused_us: float
    waiting_us: float
    fused_over_torch: float  # below 1, the kernel is faster than cuBLAS
    waiting_over_fused: float
    max_difference: float  # relative to torch's result


@dataclass(frozen=True)
class GemmSummary:
    """The lowest relative speeds over the products with at least `LEAST_ROWS` rows."""

    num_products: int
    least_of_torch: float  # speed of fused over that of torch.mm
    least_of_fused: float  # speed of fused with waits over that without

    def sentence(self) -> str:
        return (
            f"over {self.num_products} products of M >= {LEAST_ROWS}: fused has at least "
            f"{self.least_of_torch:.3f} of the speed of torch.mm (aim: {LEAST_OF_TORCH}), waiting "
            f"{self.least_of_fused:.3f} of fused (aim: {LEAST_OF_FUSED})"
        )


def summarize(rows: Sequence[GemmRow]) -> GemmSummary | None:
    """Returns the summary; None if no product has enough rows."""
    large = [row for row in rows if row.shape["M"] >= LEAST_ROWS]
    if not large:
        return None
    return GemmSummary(
        num_products=len(large),
        least_of_torch=min(1 / row.fused_over_torch for row in large),
        least_of_fused=min(1 / row.waiting_over_fused for row in large),
    )


def stored(t: Tensor, transposed: bool) -> Tensor:
    return t.t().contiguous().t() if transposed else t


def measure_gemm(m: int, n: int, k: int, dtype: str, layout: str) -> GemmRow:
    """Times one product. Needs a GPU of sm_90."""
    cuda = _library.cuda
    assert cuda is not None
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(rows: int, columns: int, transposed: bool) -> Tensor:
        t = torch.randn(rows, columns, generator=generator, device="cuda", dtype=DTYPES[dtype])
        return stored(t, transposed)

    a, b = draw(m, k, LAYOUTS[layout][0]), draw(k, n, LAYOUTS[layout][1])
    pad = torch.zeros(cuda.PAD_BYTES, dtype=torch.uint8, device="cuda")
    calls: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: torch.mm(a, b),
        "fused": lambda: cuda.gemm(a, b),
        "waiting": lambda: cuda.gemm(a, b, wait_chunks=WAIT_CHUNKS, pad=pad),
    }
    want = calls["torch"]()
    scale = want.abs().max()
    differences = [(calls[name]() - want).abs().max() / scale for name in ("fused", "waiting")]
    us = time_us(dict(calls))
    return GemmRow(
        op="gemm",
        shape={"M": m, "N": n, "K": k},
        dtype=dtype,
        layout=layout,
        torch_us=us["torch"],
        fused_us=us["fused"],
        waiting_us=us["waiting"],
        fused_over_torch=us["fused"] / us["torch"],
        waiting_over_fused=us["waiting"] / us["fused"],
        max_difference=float(max(differences).item()),
    )


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = benchmarks.add_parser(
        "gemm", help="the kernel of \"fused\" against torch.mm, on one GPU of sm_90",
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--shapes", nargs="+", default=["2048,11008,4096", "8192,14336,4096"],
                        metavar="SHAPE", help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16",
                        help="(default: %(default)s)")  # fmt: skip
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS),
                        help="(default: all)")  # fmt: skip
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write machine and rows to a file, after each of them",
    )
    parser.set_defaults(run=run)


def parse_shapes(text: str) -> tuple[tuple[int, int, int], ...]:
    """Returns the shapes of an argument of --shapes. Raises: UserError."""
    if is_published(text):
        return published_shapes(text, "expand")
    m, n, k = parse_sizes("--shapes", text)
    if any(size % 8 for size in (m, n, k)):
        raise UserError(f"--shapes: expected multiples of 8, which bulk loads need, got {text!r}")
    return ((m, n, k),)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises UserError for a mistake of the user."""
    refuse_extra("bench gemm", extra)
    shapes = dict.fromkeys(shape for text in args.shapes for shape in parse_shapes(text))
    check_writable("--json", args.json)
    if not torch.cuda.is_available():
        raise UserError("bench gemm needs a GPU of sm_90: torch sees no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    why = torch.ops.axonn._why_no_fused_here(device, DTYPES[args.dtype], 1, False)
    if why:
        raise UserError(f"bench gemm needs a GPU of sm_90: {why} (see axonn-ext doctor)")
    if _library.cuda is None or _library.cuda.gemm_source(device.index) != "cutlass":
        raise UserError("bench gemm needs a GPU of sm_90, and CUTLASS (see axonn-ext doctor)")
    print(f"{'M,N,K':>20} {'layout':>7} {'torch us':>10} {'fused us':>10} {'waiting us':>11} "
          f"{'fused/torch':>12} {'waiting/fused':>14}")  # fmt: skip
    rows: list[GemmRow] = []
    machine = describe_machine(threads=torch.get_num_threads(), device="cuda")
    with RowsFile("--json", args.json) as file:
        for (m, n, k), layout in itertools.product(shapes, args.layouts):
            rows.append(measure_gemm(m, n, k, args.dtype, layout))
            _show(rows[-1])
            summary = summarize(rows)
            file.write(content_of(machine, rows, [summary] if summary else []))
    if summary is not None:
        print(summary.sentence())
    # cuBLAS may add in another order, so results may differ by two roundings.
    return 0 if max(row.max_difference for row in rows) <= MAX_DIFFERENCE else 1


def _show(row: GemmRow) -> None:
    sizes = ",".join(map(str, row.shape.values()))
    print(f"{sizes:>20} {row.layout:>7} {row.torch_us:>10,.1f} {row.fused_us:>10,.1f} "
          f"{row.waiting_us:>11,.1f} {row.fused_over_torch:>12.3f} "
          f"{row.waiting_over_fused:>14.3f}", flush=True)  # fmt: skip
