"""`axonn-ext bench optimizer`: times AdamW steps with state in different places, against torch's.

All systems are first compared with each other, bit for bit. One whose bits differ gets no time.
"""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axonn_ext.bench.benchmark import (
    Benchmark,
    SystemRow,
    check_memory,
    columns_in_ms,
    number,
    ratio_of_rounds,
    shared_fields,
    take_turns,
)
from axonn_ext.bench.optimizer_systems import (
    CPU,
    DEVICE,
    DISK,
    FP32,
    SYSTEMS,
    TORCH,
    Case,
    System,
    build,
    drawn,
    moved_bytes,
)
from axonn_ext.calibrate.measure import Timing
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.spec.optimizer import BUCKET_ELEMENTS
from axonn_ext.terminal import charts
from axonn_ext.terminal.arguments import whole
from axonn_ext.terminal.charts import BLUE, GREEN, GREY, ORANGE
from axonn_ext.terminal.errors import UserError

COLORS = {TORCH: GREY, DEVICE: BLUE, CPU: GREEN, DISK: ORANGE}
SHADES = {"device": BLUE, "host": GREEN, "disk": ORANGE}
CHECKED_STEPS = 3
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the width of a dtype, in bytes
ELEMENTS = 64_000_000
# Bytes per element, without weights and the gradients that are shared. On the device: masters,
# gradients and moments of `torch`, state and wide gradients of `device`, and a pass. On the host:
# state of `cpu`, and a pass.
_ON_DEVICE, _ON_HOST = 16 + 16 + 4, 12 + 4
_ON_DISK = 12  # masters and moments in fp32


@dataclass(frozen=True, kw_only=True)
class OptimizerRow(SystemRow):
    """A step of AdamW over `elements`, with its state in one place.

    elements_per_ns            elements / median_us, in billions per second
    vs_torch                   the median, over the rounds, of torch's time over this one's
    pass_us, pass_bytes        the median time to multiply fp32 numbers in place, where the state is
                               updated, timed in turns with the rest; the bytes it reads and writes
    moved_bytes                the bytes that a step must read and write there; the floor is the
                               time to move these at the speed of this pass
    device_bytes               of weights, gradients, masters and moments on the device
    host_bytes, disk_bytes     of masters and moments in host memory, and in files
    """

    elements: int
    bucket_elements: int
    elements_per_ns: float | None
    vs_torch: float | None
    pass_us: float
    pass_bytes: int
    moved_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


def run_case(
    case: Case, *, rounds: int, on_round: Callable[[], None] = lambda: None
) -> list[OptimizerRow]:
    """Returns a row for each system. All are checked, then the correct ones are timed in turns.

    Raises OSError if the disk has no room.
    """
    gradients = drawn(case, seed=1)
    systems = {name: build(name, case, gradients) for name in SYSTEMS}
    right = right_systems(systems, gradients, case)
    calls = {name: systems[name].step for name in right}
    timings = take_turns(_passes(case) | calls, case.device, rounds=rounds, on_round=on_round)
    return [_row(case, name, systems[name], timings, rounds) for name in SYSTEMS]


def right_systems(systems: dict[str, System], gradients: Sequence[Tensor], case: Case) -> list[str]:
    """Returns the systems whose weights equal torch's, bit for bit, after a few steps."""
    for step in range(CHECKED_STEPS):
        for gradient, new in zip(gradients, drawn(case, seed=1 + step), strict=True):
            gradient.copy_(new)
        for system in systems.values():
            system.take()
            system.step()
    expected = systems[TORCH].weights()
    return [name for name, system in systems.items() if _same_bits(system.weights(), expected)]


def _same_bits(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all elements have the same bits, and none is NaN or infinite."""
    return all(
        bool(one.isfinite().all())
        and torch.equal(one.view(_INTEGERS[one.itemsize]), other.view(_INTEGERS[other.itemsize]))
        for one, other in zip(ones, others, strict=True)
    )


def _passes(case: Case) -> dict[str, Callable[[], object]]:
    """Returns one pass over device memory, and one over host memory.

    A pass changes its numbers in place, as AdamW does. A copy would be slower on a CPU, which first
    fetches the memory that a copy overwrites.
    """
    numbers = {
        where: torch.ones(case.elements, device=where)
        for where in dict.fromkeys((case.device, "cpu"))
    }
    return {_pass_on(where): partial(ones.mul_, 1.0) for where, ones in numbers.items()}


def _pass_on(where: str) -> str:
    return f"pass on {where}"


def _row(
    case: Case, name: str, system: System, timings: dict[str, Timing[object]], rounds: int
) -> OptimizerRow:
    timing, torchs = timings.get(name), timings.get(TORCH)
    where = "cpu" if name in (CPU, DISK) else case.device
    pass_us, moved = timings[_pass_on(where)].median_us, moved_bytes(name, case)
    pass_bytes = 2 * FP32 * case.elements  # a number for each element is read and written
    problem = "after a few steps its weights are not finite, or differ in bits from torch's"
    return OptimizerRow(
        op="optimizer",
        device=case.device,
        dtype=case.dtype,
        elements=case.elements,
        bucket_elements=case.bucket_elements,
        system=name,
        problem="" if timing else problem,
        **shared_fields(timing, pass_us * moved / pass_bytes, rounds),
        elements_per_ns=case.elements / timing.median_us / 1e3 if timing else None,
        vs_torch=ratio_of_rounds(torchs.samples_us, timing.samples_us)
        if timing and torchs
        else None,
        pass_us=pass_us,
        pass_bytes=pass_bytes,
        moved_bytes=moved,
        device_bytes=system.num_bytes.device,
        host_bytes=system.num_bytes.host,
        disk_bytes=system.num_bytes.disk,
    )


def plot_rows(rows: Sequence[OptimizerRow], subtitle: str, path: Path) -> None:
    """Draws the time of each system over the floor, and where its bytes are.

    The whisker of a time is its interquartile range. A system with wrong bits has no time.
    """
    title = f"a step of AdamW, {rows[0].elements:,} elements, {rows[0].dtype}"
    figure = charts.new_figure((9.6, 4.4), title, subtitle)
    times, memory = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.82, bottom=0.09, wspace=0.22)
    for x, row in enumerate(rows):
        if (ratio := row.ratio_to_floor) is not None:
            reach = (row.iqr_us or 0.0) / row.floor_us / 2
            charts.draw_bar(times, x, ratio, f"{ratio:.2f}", color=COLORS[row.system], reach=reach)
    bottoms = [0.0] * len(rows)
    for place, color in SHADES.items():
        heights = [getattr(row, f"{place}_bytes") / row.elements for row in rows]
        memory.bar(range(len(rows)), heights, width=0.86, bottom=bottoms, color=color)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for axes, label in ((times, "time / floor"), (memory, "bytes of an element")):
        charts.styled(axes, label).set_xticks(
            range(len(rows)), [row.system for row in rows], fontsize=9
        )
        axes.margins(y=0.12)
    charts.add_legend(figure, charts.patches(SHADES), left=0.56, inches=0.53)
    figure.savefig(path)


# --- The command ---------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--elements", type=whole(), default=ELEMENTS, metavar="N",
        help="number of elements of all weights, in a few matrices and vectors (default: "
        "%(default)s)")  # fmt: skip
    add("--bucket", type=whole(), default=BUCKET_ELEMENTS, metavar="N",
        help="number of elements per transfer to the host (default: "
        "%(default)s)")  # fmt: skip
    add("--folder", type=Path, metavar="FOLDER", default=Path(tempfile.gettempdir()),
        help="folder for the state on disk (default: the system's temporary folder)")  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    folder = args.folder
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--folder: expected a folder that can be written, got {folder}")
    # Three systems, and gradients.
    on_device = _ON_DEVICE + 4 * DTYPES[args.dtype].itemsize
    needs = {"cpu": _ON_HOST}
    needs[args.device] = needs.get(args.device, 0) + on_device
    for device, num_bytes in needs.items():
        check_memory(f"--elements {args.elements}", args.elements * num_bytes, device)
    there = os.statvfs(folder)
    free, need = there.f_bavail * there.f_frsize, args.elements * _ON_DISK
    if need > free:
        raise UserError(
            f"--folder: --elements {args.elements} needs {need / 1e9:,.1f} GB, {folder} has "
            f"{free / 1e9:,.1f} GB left"
        )


def _run(args: argparse.Namespace, on_round: Callable[[], None]) -> Iterator[list[OptimizerRow]]:
    case = Case(args.elements, args.dtype, args.device, args.bucket, args.folder)
    try:
        yield run_case(case, rounds=args.rounds, on_round=on_round)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES):
            raise
        raise UserError(f"--folder: no state fits {args.folder}: {error.strerror}") from None


OPTIMIZER: Benchmark[OptimizerRow] = Benchmark(
    "optimizer", "a step of AdamW with its state on the device, the host and the disk",
    description="""\
Times a step of AdamW on one rank, with its state on the device, in host memory and on the disk
(docs/memory.md), in turns with torch's fused AdamW over fp32 weights with fp32 gradients. All must
first give the same bits; one that does not gets no time, and the exit status is 1.
docs/benchmarks.md explains the numbers.""",
    epilog="""\
examples:
  axonn-ext bench optimizer
  axonn-ext bench optimizer --elements 16e6 --dtype fp32 --threads 0 --json optimizer.json
""",
    operands="weights",
    columns={
        "": lambda row: row.system,
        **columns_in_ms(2),
        "G el/s": lambda row: number(row.elements_per_ns),
        "vs torch": lambda row: number(row.vs_torch),
        "x floor": lambda row: number(row.ratio_to_floor),
        "device MB": lambda row: number(row.device_bytes / 1e6, 1),
        "host MB": lambda row: number(row.host_bytes / 1e6, 1),
        "disk MB": lambda row: number(row.disk_bytes / 1e6, 1),
    },
    title=lambda row: f"optimizer  {row.elements:,} elements  {row.dtype}, {row.where}",
    legend="ms: a step, median; spread: width of the middle half; G el/s: 10^9 elements a second; "
    "vs torch: speed relative to torch's fused AdamW in fp32; floor: the bytes that must be read "
    "and written, at the speed of a pass in place; MB: weights, gradients, masters and moments. "
    "What the columns mean: docs/benchmarks.md.",
    add_options=_add_options, check=_check, run=_run, draw=plot_rows,
)  # fmt: skip
