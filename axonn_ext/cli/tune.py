"""`axonn-ext tune`: measures, ahead of a job, how each product of a model is computed fastest."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor

from axonn_ext import models, settings, tuning
from axonn_ext.bench.command import check_device
from axonn_ext.bench.machine import default_device, describe_machine
from axonn_ext.bench.results import check_writable
from axonn_ext.grid import GridShape
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.products import PRESETS, Product, linear_products
from axonn_ext.train import process
from axonn_ext.train.config_file import load_config
from axonn_ext.train.errors import UserError
from axonn_ext.train.job import prepare

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIN_WIDTH = 110  # of the table; a file or a pipe would get 80 columns, and numbers cut short
REMARKS = {"measured": "", "disk": "kept", "small": "too small to ask"}

DESCRIPTION = """\
Measures the matrix products of a model's Linears, as one rank of the grid computes them (forward,
dgrad, wgrad), in every way that exists, keeps the fastest in AXONN_CACHE_DIR, and shows what was
won. Jobs on this machine with equal sizes, dtype and threads then use them, wherever algorithm
"auto" multiplies whole matrices: on GPUs, and on CPUs of several hosts (ranks of one host have
"fused", whose products are its own). One process; what is kept already is not measured again."""

EPILOG = """\
examples:
  axonn-ext tune --model gpt2-small
  axonn-ext tune --model llama2-7b --grid x=2,y=2,z=2 --batch 16 --json products.json
  axonn-ext tune --model examples/demo.toml --grid 2x2x1 --device cpu
"""


@dataclass(frozen=True)
class Request:
    """Whose products are measured, and on what."""

    name: str
    model: ModelConfig
    grid: GridShape
    batch_size: int
    dtype: str
    device: str

    def products(self) -> list[Product]:
        return linear_products(
            self.model, self.grid, batch_size=self.batch_size, adds_bias=self.device == "cuda"
        )


@dataclass(frozen=True)
class Row:
    """What a product takes, in microseconds. source "small": Linears do not ask about it.

    won_percent: of the time that "direct" takes
    """

    product: Product
    direct_us: float | None
    winner: str
    winner_us: float | None
    won_percent: float | None
    source: str
    median_us: dict[str, float]


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "tune", help="measure a model's matrix products", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|FILE.toml",
        help=f"{', '.join(PRESETS)}, or a file as axonn-ext train takes it")  # fmt: skip
    add("--grid", metavar="SHAPE",
        help="x=2,y=2,z=1 (left out: 1) or 2x2x1 (default: the file's, or 1x1x1)")  # fmt: skip
    add("--batch", type=int, metavar="N",
        help="sequences of a micro-batch over the whole grid (default: the file's, or one for each "
        "rank of data, z and y)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU)")
    add("--dtype", choices=tuple(DTYPES), help="(default: the file's, or bf16 on cuda, else fp32)")
    add("--threads", type=int, metavar="N", help="of the job's ranks (default: torch's)")
    add("--json", type=Path, metavar="FILE", help="write machine and rows to a JSON file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    if extra:
        raise UserError(f"unknown argument {extra[0]} (see axonn-ext tune --help)")
    here = process.this_process()
    if here is not None and here.world_size > 1:
        raise UserError(
            f"tune runs in one process, got {here.world_size}: it computes what one rank of --grid "
            "does; start it without torchrun"
        )
    request = make_request(args)
    check_writable("--json", args.json)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    rows = measure_all(console, request)
    report(console, request, rows)
    if args.json is not None:
        _write_json(args.json, request, rows)
        console.print(f"written: {args.json}", highlight=False, markup=False, soft_wrap=True)
    return 0


def make_request(args: argparse.Namespace) -> Request:
    """What the arguments ask for. Raises UserError for what cannot be."""
    for option in ("batch", "threads"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f"--{option}: expected a whole number >= 1, got {value}")
    device = args.device or default_device()
    check_device(device)
    if args.model.endswith(".toml"):
        return _request_of_file(args, device)
    if args.model not in PRESETS:
        raise UserError(
            f"--model: expected one of {', '.join(PRESETS)} or a file that ends in .toml, got "
            f"{args.model!r}"
        )
    try:
        grid = GridShape.parse(args.grid or "1x1x1")
    except ValueError as error:
        raise UserError(f"--grid {args.grid}: {error}") from None
    request = Request(
        args.model, PRESETS[args.model], grid, args.batch or grid.data * grid.z * grid.y,
        args.dtype or ("bf16" if device == "cuda" else "fp32"), device,
    )  # fmt: skip
    problems = models.check(request.model, ParallelConfig(), grid, batch_size=request.batch_size)
    if problems:
        fits = f"grid {grid} does not fit {request.name} and --batch {request.batch_size}:"
        raise UserError("\n  ".join([fits, *problems]))
    return request


def _request_of_file(args: argparse.Namespace, device: str) -> Request:
    """The job of a configuration file, with what the command line says otherwise."""
    config = load_config(Path(args.model), grid=args.grid)
    changes: dict[str, Any] = {"device": device}
    if args.batch is not None:
        changes |= {"batch_size": args.batch, "micro_batches": 1}
    if args.dtype is not None:
        changes["dtype"] = args.dtype
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))
    try:
        world_size = config.grid_shape().size
    except ValueError as error:
        raise UserError(str(error)) from None
    job = prepare(config, world_size=world_size)
    if config.model.implementation == "plain":
        raise UserError("model.implementation plain has no Linears of axonn_ext to tune")
    return Request(
        args.model, job.model, job.grid_shape, config.micro_batch_size, config.train.dtype, device
    )


def measure_all(console: Console, request: Request) -> list[Row]:
    """A row for each product, with a bar on a terminal while they are measured."""
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        products = request.products()
        task = progress.add_task("", total=len(products))
        for product in products:
            progress.update(task, description=f"{product.product_pass} {_sizes(product)}")
            rows.append(measure_product(product, DTYPES[request.dtype], request.device))
            progress.advance(task)
    return rows


def measure_product(product: Product, dtype: torch.dtype, device: str) -> Row:
    """The choice for one product, on random operands that are laid out as in the Linear."""

    def operand(rows: int, columns: int, layout: str) -> Tensor:
        sizes = (rows, columns) if layout == "N" else (columns, rows)
        whole = torch.randn(sizes, dtype=dtype, device=device)
        return whole if layout == "N" else whole.t()

    a = operand(product.m, product.k, product.layout[0])
    b = operand(product.k, product.n, product.layout[1])
    bias = torch.randn(product.n, dtype=dtype, device=device) if product.bias else None
    choice = tuning.tune_product(a, b, bias=bias, product_pass=product.product_pass)
    if choice is None:
        return Row(product, None, "direct", None, None, "small", {})
    direct, best = choice.median_us["direct"], choice.median_us[choice.algorithm]
    won = 100 * (direct - best) / direct
    return Row(product, direct, choice.algorithm, best, won, choice.source, choice.median_us)


def report(console: Console, request: Request, rows: Sequence[Row]) -> None:
    """The table, and where it is kept."""
    model = f"{request.name} on {request.grid}, {request.batch_size} sequences a micro-batch"
    kind = f"{request.dtype} on {request.device}"
    if request.device == "cpu":
        kind += f", {torch.get_num_threads()} threads"
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    for name in ("pass", "Linears", "m,n,k", "layout", "direct us", "winner", "won %", ""):
        numbers = name in ("m,n,k", "direct us", "won %")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        product = row.product
        table.add_row(
            product.product_pass, _linears(product), _sizes(product),
            product.layout + (" + bias" if product.bias else ""), _number(row.direct_us),
            row.winner, _number(row.won_percent), REMARKS[row.source],
            style="green" if row.winner != "direct" else "",
        )  # fmt: skip
    lines: list[str | Table] = [f"{model}; {kind}", table]
    if (speedup := mean_speedup(rows)) is not None:
        lines.append(f"{speedup:.3f} times as fast as direct, the geometric mean of the products")
    if request.device == "cpu":
        lines.append("used by ranks on several hosts; on one host Linears are fused instead")
    folder = settings.load().cache_dir
    lines.append(f"kept in {folder}" if folder else "kept nowhere: AXONN_CACHE_DIR is empty")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=not isinstance(line, Table))


def mean_speedup(rows: Sequence[Row]) -> float | None:
    """The geometric mean over products of direct / winner; None if nothing was measured."""
    ratios = [row.direct_us / row.winner_us for row in rows if row.direct_us and row.winner_us]
    return statistics.geometric_mean(ratios) if ratios else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _sizes(product: Product) -> str:
    return f"{product.m},{product.n},{product.k}"


def _linears(product: Product) -> str:
    return ", ".join(name.rpartition(".")[2] for name in product.linears)


def _write_json(path: Path, request: Request, rows: Sequence[Row]) -> None:
    content = {
        "machine": describe_machine(threads=torch.get_num_threads(), device=request.device),
        "model": request.name,
        "grid": request.grid.as_dict(),
        "batch": request.batch_size,
        "dtype": request.dtype,
        "device": request.device,
        "mean_speedup": mean_speedup(rows),
        "rows": [dataclasses.asdict(row.product) | _times(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _times(row: Row) -> dict[str, Any]:
    return {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "product"}
