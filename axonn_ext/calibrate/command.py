"""`axonn-ext bench links`: starts the ranks, and writes what they measure as a machine file."""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from axonn_ext.calibrate.file import LinkRow, link_rows, machine_file, peak_flops
from axonn_ext.calibrate.find_machine import measured_file
from axonn_ext.calibrate.plan import Plan
from axonn_ext.calibrate.this_machine import default_device, describe_machine, num_cores
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec import settings
from axonn_ext.terminal.arguments import MOST_PROCESSES, MOST_THREADS, new_parser, whole
from axonn_ext.terminal.console import Console, print_table, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable, make_folder, write_text

DEVICES = ("cpu", "cuda")
DTYPES = ("bf16", "fp16", "fp32")
PLAN_FILE, RESULT_FILE = "plan.json", "result.json"

DESCRIPTION = """\
Measures this machine for the planner: bandwidth and latency of every kind of group of ranks, matrix
products, memory and attention. All ranks do the same at once, as in training. `axonn-ext plan
--machine this` plans for the result."""
EPILOG = """\
examples:
  axonn-ext bench links --nproc 8
  axonn-ext bench links --nproc 8 --out here.toml --json here.json
  AXONN_EMULATED_LINKS=x=0.04,y=0.02,z=0.01,data=0.005 axonn-ext bench links --nproc 8

With emulated links, groups are measured for each axis."""


def add_parser(benchmarks: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        benchmarks, "links", run, description=DESCRIPTION, epilog=EPILOG,
        help="links, GEMMs and memory of this machine, measured for the planner",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--nproc",
        type=whole(1, MOST_PROCESSES),
        metavar="N",
        help="number of ranks to start (default: one per GPU, on CPUs one per core)",
    )
    add("--device", choices=DEVICES,
        help="device to measure (default: cuda if there is a GPU, else cpu)")  # fmt: skip
    add("--dtype", action="append", choices=DTYPES,
        help="dtype of products and attention; may be given several times (default: fp32; on cuda "
        "bf16 and fp32)")  # fmt: skip
    add("--threads", type=whole(0, MOST_THREADS), default=1, metavar="N",
        help="CPU threads per rank; 0: its share of the cores (default: %(default)s)")  # fmt: skip
    add("--rounds", type=whole(), default=7, metavar="N",
        help="number of rounds; everything is timed once per round (default: "
        "%(default)s)")  # fmt: skip
    add("--out", type=Path, metavar="FILE.toml",
        help="machine file to write (default: machines/this.toml in AXONN_CACHE_DIR)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write every measured time to a JSON file")
    add("--worker", type=Path, help=argparse.SUPPRESS)  # folder of a launch


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises what `axonn_ext.cli.main` turns into messages."""
    here = process.this_process()
    if args.worker is not None:
        run_folder(args.worker, here or Process())
        return 0
    if here is not None:
        raise UserError("bench links starts its own processes; start it without torchrun")
    plan, out = make_plan(args), _out(args)
    for option, path in (("--out", out), ("--json", args.json)):
        if path is not None:
            make_folder(option, path.parent)
        check_writable(option, path)
    Console(stderr=True).print(
        f"measuring {len(plan.groups)} shapes of groups and {len(plan.products)} products on "
        f"{plan.num_ranks} ranks", style="dim", highlight=False,
    )  # fmt: skip
    measured = _launch(plan)
    _write(args, plan, measured, out)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Returns the plan of the arguments. Raises: UserError."""
    import torch

    device = args.device or default_device()
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and not num_gpus:
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    nproc = (num_gpus if device == "cuda" else num_cores()) if args.nproc is None else args.nproc
    dtypes = tuple(args.dtype or (("bf16", "fp32") if device == "cuda" else ("fp32",)))
    links = settings.load().emulated_links
    return Plan(
        nproc, device, tuple(dict.fromkeys(dtypes)), args.rounds, args.threads,
        by_axis=bool(links) and device == "cpu",
    )  # fmt: skip


def run_folder(folder: Path, here: Process) -> None:
    """Runs one rank's part of the plan in the folder; rank 0 writes the result there."""
    from axonn_ext.calibrate.ranks import measure_machine

    plan = Plan.from_json((folder / PLAN_FILE).read_text())
    store = process.open_store(here)
    process.meet(store, here, lambda: process.plan_values("bench links", plan))
    process.set_threads(here, plan.threads)
    with process.process_group(here, store, plan.device):
        measured = measure_machine(plan)
    if here.rank == 0:
        (folder / RESULT_FILE).write_text(json.dumps(measured))


def _launch(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="axonn_ext_links_") as name:
        folder = Path(name)
        (folder / PLAN_FILE).write_text(plan.to_json())
        launch(plan.num_ranks, ["bench", "links", "--worker", name])
        measured: dict[str, Any] = json.loads((folder / RESULT_FILE).read_text())
        return measured


def _out(args: argparse.Namespace) -> Path:
    if args.out is not None:
        return Path(args.out)
    kept = measured_file()
    if kept is None:
        raise UserError("AXONN_CACHE_DIR is empty, so nothing is kept: give --out FILE.toml")
    return kept


# --- What comes out ------------------------------------------------------------------------------


def _write(args: argparse.Namespace, plan: Plan, measured: dict[str, Any], out: Path) -> None:
    machine = describe_machine(threads=plan.threads, device=plan.device)
    links = settings.load().emulated_links
    what = f"{machine.get('gpu', machine['cpu'])}, {machine['cores']} cores, {plan.num_ranks} ranks"
    if plan.by_axis:
        speeds = ", ".join(f"{axis} {speed:g} GB/s" for axis, speed in links.items())
        what += f"; emulated links: {speeds}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured by axonn-ext bench links, {today}, torch {machine['torch']}"
    crowding = plan.num_ranks * plan.threads / num_cores() if plan.device == "cpu" else 1.0
    text = machine_file(
        measured, num_ranks=plan.num_ranks, ranks_per_core=crowding, device=plan.device,
        description=what, source=source,
    )  # fmt: skip
    write_text("--out", out, text)
    console = Console()
    console.width = max(console.width, 100)
    _show(console, measured)
    written = [out]
    if args.json is not None:
        content = json.dumps({"machine": machine, **measured}, indent=1)
        write_text("--json", args.json, content + "\n")
        written.append(args.json)
    names = ", ".join(str(path) for path in written)
    say(console, f"written: {names}")


def _show(console: Console, measured: dict[str, Any]) -> None:
    table = Table(title="links, all groups at once", title_justify="left", box=None,
                  header_style="dim", pad_edge=False, padding=(0, 1))  # fmt: skip
    for column in ("axis", "inner", "ranks", "collective", "MB/s", "latency", "spread", "misfit"):
        table.add_column(column, justify="left" if column in ("axis", "collective") else "right")
    for row in link_rows(measured):
        table.add_row(*_cells(row))
    print_table(console, table)
    for dtype, rate in peak_flops(measured).items():
        attention = measured["attention"][dtype]
        text = f"{dtype}: products {rate / 1e9:,.1f} Gflop/s, attention {attention / 1e9:,.1f}"
        console.print(text, highlight=False, markup=False)
    console.print(
        f"memory {measured['memory_bytes_per_s'] / 1e9:,.2f} GB/s, "
        f"a call {measured['launch_s'] * 1e6:,.1f} us; all of one rank, all ranks at once",
        highlight=False, markup=False,
    )  # fmt: skip


def _cells(row: LinkRow) -> list[str]:
    return [
        row.axis or "any", str(row.inner), str(row.size), row.kind,
        f"{row.line.bytes_per_s / 1e6:,.1f}", f"{row.latency_s * 1e6:,.0f} us",
        f"{row.spread:.0%}", f"{row.line.error:.0%}",
    ]  # fmt: skip
