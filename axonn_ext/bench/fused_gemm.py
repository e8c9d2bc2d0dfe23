"""`axonn-ext bench gemm`: times the fused GEMM, without any communication, next to torch.mm."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from axonn_ext.bench import gemm_tiles
from axonn_ext.bench.benchmark import add_json, check_memory
from axonn_ext.bench.gemm_tiles import TILE_ROWS, TILE_SHAPES, measure_tiles, parse_tiles
from axonn_ext.bench.link_overlap import parse_sizes, show_rows, time_us
from axonn_ext.calibrate.shapes import GemmShape, describe, is_published, published_shapes
from axonn_ext.kernels import extension
from axonn_ext.terminal.arguments import new_parser
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.rows import Column

# BLAS names for the layouts of y = x @ weight.t(), dx = dy @ weight, dweight = dy.t() @ x.
LAYOUTS = {"tn": (False, True), "nn": (False, False), "nt": (True, False)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAIT_CHUNKS = 4
DESCRIPTION = """\
Runs on one GPU of sm_90. Times A [M, K] @ B [K, N] by torch.mm (cuBLAS), by the kernel of "fused"
without waits, and by the same kernel as if A came in 16 chunks, all of which have arrived. The
second over the first is the cost of our kernel; the third over the second is that of waiting. The
last lines give the lowest speed of both for M >= 2048, below which auto has other kernels. SHAPE is
M,N,K, "published" (MLPs of models from 7B to 405B) or published:M,M,... for some of its M.

With --tiles: times torch.mm, and the kernel without waits on each tile, next to the modelled time
by which a call chooses its tile."""
EPILOG = """\
examples:
  axonn-ext bench gemm --shapes published:8192 --layouts tn
  axonn-ext bench gemm --tiles all --json tiles.json
  axonn-ext bench gemm --tiles 128x256 64x128 --shapes 512,11008,4096
"""
SHAPES = (GemmShape(2048, 11008, 4096), GemmShape(8192, 14336, 4096))
COLUMNS = (
    Column("M,N,K", 17, is_number=True),
    Column("layout"),
    Column("torch us", 9, is_number=True),
    Column("fused us", 9, is_number=True),
    Column("waiting us", is_number=True),
    Column("fused/torch", is_number=True),
    Column("waiting/fused", is_number=True),
)
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

    def cells(self) -> tuple[str, ...]:
        """Returns the row's cells below COLUMNS."""
        times = (self.torch_us, self.fused_us, self.waiting_us)
        ratios = (self.fused_over_torch, self.waiting_over_fused)
        return (
            ",".join(map(str, self.shape.values())),
            self.layout,
            *(f"{us:,.1f}" for us in times),
            *(f"{ratio:.3f}" for ratio in ratios),
        )


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


def summarize(rows: Sequence[GemmRow]) -> list[GemmSummary]:
    """Returns the summary; none if no product has enough rows."""
    large = [row for row in rows if row.shape["M"] >= LEAST_ROWS]
    if not large:
        return []
    least_of_torch = min(1 / row.fused_over_torch for row in large)
    least_of_fused = min(1 / row.waiting_over_fused for row in large)
    return [GemmSummary(len(large), least_of_torch, least_of_fused)]


def stored(t: Tensor, transposed: bool) -> Tensor:
    return t.t().contiguous().t() if transposed else t


def draw_operands(m: int, n: int, k: int, dtype: str, layout: str) -> tuple[Tensor, Tensor]:
    """Returns a [m, k] and b [k, n] on the GPU, stored in the layout."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(rows: int, columns: int, transposed: bool) -> Tensor:
        t = torch.randn(rows, columns, generator=generator, device="cuda", dtype=DTYPES[dtype])
        return stored(t, transposed)

    return draw(m, k, LAYOUTS[layout][0]), draw(k, n, LAYOUTS[layout][1])


def measure_gemm(m: int, n: int, k: int, dtype: str, layout: str) -> GemmRow:
    """Times one product. Needs an sm_90 GPU."""
    cuda = extension.cuda
    assert cuda is not None
    a, b = draw_operands(m, n, k, dtype, layout)
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
    parser = new_parser(
        benchmarks, "gemm", run, description=DESCRIPTION, epilog=EPILOG,
        help='the kernel of "fused" and its tiles against torch.mm, on one GPU of sm_90',
    )  # fmt: skip
    add = parser.add_argument
    add("--shapes", nargs="+", default=[], metavar="SHAPE",
        help="sizes of the products (default: 2048,11008,4096 8192,14336,4096; with --tiles the "
        "published layers with "
        f"M = {', '.join(map(str, TILE_ROWS))})")  # fmt: skip
    add("--dtype", choices=list(DTYPES), default="bf16",
        help="dtype of the operands (default: %(default)s)")  # fmt: skip
    add("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS),
        help="layouts of the operands, as BLAS names them: tn (forward), nn (dgrad), nt (wgrad) "
        "(default: all)")  # fmt: skip
    add("--tiles", nargs="+", metavar="TILE",
        help="tiles of the kernel to time, such as 128x256, or all")  # fmt: skip
    add_json(parser, ", updated after each shape")


def parse_shapes(text: str) -> tuple[GemmShape, ...]:
    """Returns the shapes of an argument of --shapes. Raises: UserError."""
    if is_published(text):
        return published_shapes(text, "expand")
    m, n, k = parse_sizes("--shapes", text)
    if any(size % 8 for size in (m, n, k)):
        raise UserError(f"--shapes: expected multiples of 8, which bulk loads need, got {text!r}")
    return (GemmShape(m, n, k),)


def shapes_of(args: argparse.Namespace) -> list[GemmShape]:
    """Returns the requested shapes, or the default ones. Raises: UserError."""
    default = SHAPES if args.tiles is None else TILE_SHAPES
    asked = [shape for text in args.shapes for shape in parse_shapes(text)]
    return list(dict.fromkeys(asked or default))


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises UserError for a mistake by the user."""
    shapes, dtype = shapes_of(args), args.dtype
    tiles = None if args.tiles is None else parse_tiles(args.tiles)
    check_writable("--json", args.json)
    _check_gpu(args, shapes)
    products = [(shape, layout) for shape in shapes for layout in args.layouts]
    if tiles is None:
        groups = ([measure_gemm(*shape, dtype, layout)] for shape, layout in products)
        return show_rows(args.json, COLUMNS, groups, summarize)
    of_tiles = (
        measure_tiles(
            *draw_operands(*shape, dtype, layout), dtype=dtype, layout=layout, asked=tiles
        )
        for shape, layout in products
    )
    return show_rows(args.json, gemm_tiles.COLUMNS, of_tiles, gemm_tiles.summarize)


def _check_gpu(args: argparse.Namespace, shapes: Sequence[GemmShape]) -> None:
    """Raises UserError if there is no GPU with the kernels, or if its memory is too small."""
    if not torch.cuda.is_available():
        raise UserError("bench gemm needs a GPU of sm_90: torch sees no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    why = torch.ops.axonn._why_no_fused_here(device, DTYPES[args.dtype], 1, False)
    if why:
        raise UserError(f"bench gemm needs a GPU of sm_90: {why} (see axonn-ext doctor)")
    if extension.cuda is None or extension.cuda.gemm_source(device.index) != "cutlass":
        raise UserError("bench gemm needs a GPU of sm_90, and CUTLASS (see axonn-ext doctor)")
    for shape in shapes:
        num_bytes = shape.num_elements * DTYPES[args.dtype].itemsize
        check_memory(f"--shapes: {describe(shape)}", num_bytes, "cuda")
