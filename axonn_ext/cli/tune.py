"""`axonn-ext tune`: finds, before a job, the fastest kernel for each product of its Linears."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from axonn_ext import models
from axonn_ext.calibrate.products import ProductRow, gain, measure_product, sizes
from axonn_ext.calibrate.shapes import (
    PUBLISHED_LAYERS,
    PUBLISHED_ROWS,
    GemmShape,
    is_preset,
    parse_shapes,
    problems,
)
from axonn_ext.calibrate.this_machine import check_device, default_device, describe_machine
from axonn_ext.ranks.launch import process
from axonn_ext.spec import settings
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import LinearSpec
from axonn_ext.spec.parallel import ROLES, ParallelConfig
from axonn_ext.spec.presets import PRESETS
from axonn_ext.spec.products import Product, linear_products, products_of_linears
from axonn_ext.terminal.arguments import MOST_THREADS, new_parser, whole
from axonn_ext.terminal.console import Bar, Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.grids import parse_grid
from axonn_ext.terminal.memory import memory_problem
from axonn_ext.terminal.rows import Column, RowsFile, RowsTable
from axonn_ext.train.config_file import load_config
from axonn_ext.train.job import prepare

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REMARKS = {"measured": "", "disk": "kept", "small": "too small to ask"}

DESCRIPTION = """\
Times the matrix products of a model's Linears, or of Linears of given sizes, as one rank of the
grid computes them (forward, dgrad, wgrad), with every available kernel, and keeps the fastest in
AXONN_CACHE_DIR. Each winner is then timed again, in turns with "direct", the library's call, to
show the gain. Jobs on this machine with the same sizes, dtype and threads use the winners wherever
algorithm "auto" multiplies whole matrices: on GPUs, and on CPUs of several hosts (ranks of one host
use "fused", which has its own products). Runs in one process; products that are already kept are
not measured again."""

EPILOG = f"""\
shapes:
  M,N,K              a Linear: M rows, N out-features (over x), K in-features (over y)
  llama-70b, gpt3    layers of Llama 2 70B (4096 tokens) and GPT-3 175B (2048 tokens)
  published          {len(PUBLISHED_LAYERS)} MLPs of models from 7B to 405B, up and down, each with
                     M = {", ".join(map(str, PUBLISHED_ROWS))};
                     published:64,1024 has only these M. The largest product needs about 8 GB in
                     bf16; all take minutes on a GPU, and hours on a CPU

examples:
  axonn-ext tune --model gpt2-small
  axonn-ext tune --model llama2-7b --grid x=2,y=2,z=2 --batch 16 --json products.json
  axonn-ext tune --model examples/demo.toml --grid 2x2x1 --device cpu
  axonn-ext tune --shapes published --grid x=8 --json published.json
"""


@dataclass(frozen=True)
class Request:
    """The products to measure, and their device.

    name: the name of a model, or the requested shapes, which have no batch
    """

    name: str
    products: tuple[Product, ...]
    grid: GridShape
    batch_size: int | None
    dtype: str
    device: str


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "tune", run, description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="NAME|FILE.toml",
        help=f"model to tune for: {', '.join(PRESETS)}, or a TOML file of axonn-ext train",
    )  # fmt: skip
    what.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help="sizes of Linears to tune for; see below"
    )
    add("--grid", metavar="SHAPE",
        help="grid of the job: x=2,y=2,z=1 (axes left out have size 1) or 2x2x1 (default: the "
        "file's, or 1x1x1)")  # fmt: skip
    add("--batch", type=whole(), metavar="N",
        help="sequences per micro-batch, over the whole grid (default: the file's, or one per rank "
        "of data, z and y)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"),
        help="device to measure on (default: cuda if there is a GPU, else cpu)")  # fmt: skip
    add("--dtype", choices=tuple(DTYPES),
        help="dtype of the products (default: the file's, or bf16 on cuda, else fp32)")  # fmt: skip
    add(
        "--threads",
        type=whole(1, MOST_THREADS),
        metavar="N",
        help="CPU threads of each rank of the job (default: torch's)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write machine and rows to a JSON file, updated after each product",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    here = process.this_process()
    if here is not None and here.world_size > 1:
        raise UserError(
            f"tune runs in one process, got {here.world_size}: it computes what one rank of --grid "
            "does; start it without torchrun or srun"
        )
    request = make_request(args)
    _check_memory(request)
    check_writable("--json", args.json)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console = Console()
    say(console, _title(request))
    rows, table = [], _table(console, request)
    machine = describe_machine(threads=torch.get_num_threads(), device=request.device)
    with RowsFile("--json", args.json) as file:
        for row in measure_all(console, request):
            rows.append(row)
            _show(table, row)
            file.write(_document(machine, request, rows))
    report(console, request, rows)
    if args.json is not None:
        say(console, f"written: {args.json}")
    return 0


def make_request(args: argparse.Namespace) -> Request:
    """Returns the request of the arguments. Raises UserError if it cannot be fulfilled."""
    device = args.device or default_device()
    check_device(device)
    if args.shapes is not None:
        return _request_of_shapes(args, device)
    if args.model.endswith(".toml"):
        return _request_of_file(args, device)
    if args.model not in PRESETS:
        raise UserError(
            f"--model: expected one of {', '.join(PRESETS)} or a file that ends in .toml, got "
            f"{args.model!r}"
        )
    model, grid = PRESETS[args.model], _grid(args)
    batch_size = args.batch or grid.data * grid.z * grid.y
    found = models.check(model, ParallelConfig(), grid, batch_size=batch_size)
    if found:
        fits = f"grid {grid} does not fit {args.model} and --batch {batch_size}:"
        raise UserError("\n  ".join([fits, *found]))
    products = linear_products(model, grid, batch_size=batch_size, adds_bias=device == "cuda")
    return Request(args.model, tuple(products), grid, batch_size, _dtype(args, device), device)


def _check_memory(request: Request) -> None:
    """Raises UserError for a product whose matrices by themselves do not fit into memory."""
    width = DTYPES[request.dtype].itemsize
    for p in request.products:
        num_bytes = (p.m * p.n + p.n * p.k + p.m * p.k) * width
        problem = memory_problem(f"the product {sizes(p)}", num_bytes, request.device)
        if problem:
            raise UserError(problem)


def _grid(args: argparse.Namespace) -> GridShape:
    return parse_grid("--grid", args.grid or "1x1x1")


def _dtype(args: argparse.Namespace, device: str) -> str:
    return args.dtype or ("bf16" if device == "cuda" else "fp32")


def _request_of_shapes(args: argparse.Namespace, device: str) -> Request:
    """Returns a request for Linears of the given sizes, and of presets in both roles."""
    if args.batch is not None:
        raise UserError("--batch needs --model: with --shapes, M is the number of rows")
    grid = _grid(args)
    linears: dict[int, list[LinearSpec]] = {}  # the keys are M
    found = []
    for text in args.shapes:
        for role in ROLES if is_preset(text) else ("expand",):
            for shape in parse_shapes("linear", [text], role=role):
                assert isinstance(shape, GemmShape)
                found += problems("linear", shape, grid, role=role, layout="sharded")
                linear = LinearSpec(f"{role} {shape.N}x{shape.K}", role, shape.N, shape.K, False)
                linears.setdefault(shape.M, []).append(linear)
    if found:
        raise UserError(*dict.fromkeys(found))
    products = [
        product
        for m, group in linears.items()
        for product in products_of_linears(
            tuple(dict.fromkeys(group)), grid, m=m // grid.z, adds_bias=False
        )
    ]
    name = " ".join(args.shapes)
    return Request(name, tuple(products), grid, None, _dtype(args, device), device)


def _request_of_file(args: argparse.Namespace, device: str) -> Request:
    """Returns a request for a configuration file's job, with the command line's changes."""
    config = load_config(Path(args.model), grid=args.grid, option="--model")
    changes: dict[str, Any] = {"device": device}
    if args.batch is not None:
        changes |= {"batch_size": args.batch, "micro_batches": 1}
    if args.dtype is not None:
        changes["dtype"] = args.dtype
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))
    job = prepare(config, world_size=config.grid.size)
    if config.model.implementation == "plain":
        raise UserError("model.implementation plain has no Linears of axonn_ext to tune")
    grid, batch_size = config.grid, config.micro_batch_size
    products = linear_products(job.model, grid, batch_size=batch_size, adds_bias=device == "cuda")
    return Request(args.model, tuple(products), grid, batch_size, config.train.dtype, device)


def measure_all(console: Console, request: Request) -> Iterator[ProductRow]:
    """Yields a row for each product; a terminal shows a bar while they are measured."""
    with closing(Bar(console, len(request.products))) as bar:
        for product in request.products:
            bar.show(f"{product.product_pass} {sizes(product)}")
            yield measure_product(product, DTYPES[request.dtype], request.device)
            bar.advance()


def report(console: Console, request: Request, rows: Sequence[ProductRow]) -> None:
    """Prints the gain over all products, and the folder that keeps the choices."""
    lines = []
    if (won := gain(rows)) is not None:
        lines.append(won.sentence())
    if request.device == "cpu":
        lines.append("used by ranks on several hosts; on one host Linears are fused instead")
    folder = settings.load().cache_dir
    lines.append(f"kept in {folder}" if folder else "kept nowhere: AXONN_CACHE_DIR is empty")
    for line in lines:
        say(console, line)


def _title(request: Request) -> str:
    what = f"{request.name} on {request.grid}"
    if request.batch_size is not None:
        what += f", {request.batch_size} sequences a micro-batch"
    kind = f"{request.dtype} on {request.device}"
    if request.device == "cpu":
        kind += f", {torch.get_num_threads()} threads"
    return f"{what}; {kind}"


def _table(console: Console, request: Request) -> RowsTable:
    known = [_known_cells(product) for product in request.products]
    widths = [max(map(len, cells)) for cells in zip(*known, strict=True)]
    columns = [
        Column(title, width, is_number=title == "m,n,k")
        for title, width in zip(("pass", "Linears", "m,n,k", "layout"), widths, strict=True)
    ]
    times = [Column(title, 11, is_number=True) for title in ("direct us", "winner us")]
    return RowsTable(
        console, [*columns, *times, Column("speedup", is_number=True), Column("winner")]
    )


def _known_cells(product: Product) -> tuple[str, ...]:
    """Returns the cells that are known before a product is measured."""
    layout = product.layout + (" + bias" if product.bias else "")
    return product.product_pass, _linears(product), sizes(product), layout


def _show(table: RowsTable, row: ProductRow) -> None:
    speedup = "-" if row.speedup is None else f"{row.speedup:.3f}"
    remark = REMARKS[row.source]
    winner = f"{row.winner} ({remark})" if remark else row.winner
    cells = (*_known_cells(row.product), _number(row.direct_us), _number(row.winner_us), speedup)
    table.add([*cells, winner], "green" if row.winner != "direct" else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _linears(product: Product) -> str:
    return ", ".join(name.rpartition(".")[2] for name in product.linears)


def _document(
    machine: dict[str, Any], request: Request, rows: Sequence[ProductRow]
) -> dict[str, Any]:
    """Returns the content of --json."""
    won = gain(rows)
    return {
        "machine": machine,
        "model": request.name,
        "grid": request.grid.as_dict(),
        "batch": request.batch_size,
        "dtype": request.dtype,
        "device": request.device,
        "mean_speedup": None if won is None else won.mean_speedup,
        "worst_speedup": None if won is None else won.worst_speedup,
        "rows": [dataclasses.asdict(row.product) | _times(row) for row in rows],
    }


def _times(row: ProductRow) -> dict[str, Any]:
    return {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "product"}
