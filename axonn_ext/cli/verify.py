"""`axonn-ext verify`: checks the kernels on this machine's GPUs, and keeps the results."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_ext.ranks.launch.parent import end_with
from axonn_ext.spec import settings
from axonn_ext.terminal.arguments import new_parser
from axonn_ext.terminal.console import Bar, Console, say
from axonn_ext.terminal.errors import UserError

if TYPE_CHECKING:
    from axonn_ext.kernels.verified import Key, Verdict
    from axonn_ext.terminal.rows import RowsTable
    from axonn_ext.verify.groups import Group
    from axonn_ext.verify.record import Record
    from axonn_ext.verify.run import Outcome

# Device files of the drivers of NVIDIA, Tegra, Windows (WSL) and AMD. Without any there is no GPU,
# and we know it without loading Torch.
DEVICE_FILES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")
NO_GPU = (
    "axonn-ext verify needs an NVIDIA GPU, and {}: run it where the job will run. CPUs do not need "
    "it"
)

DESCRIPTION = """\
Checks the fused ops and the alternative kernels for matrix products on the GPUs of this machine, on
random data, against float64 references. This takes about 3 minutes, longer where Triton compiles
kernels. AXONN_CACHE_DIR keeps which kernels are correct, for this GPU model and the installed
driver, torch, NCCL, triton and axonn_ext: algorithm "auto" then also measures "fused" and
"fused_sm90". It also keeps which are wrong; these are not used. A run that is cut short keeps the
kernels that it has checked completely. Exit status: 0 nothing failed, 1 something failed, 2 there
is no GPU."""

EPILOG = """\
examples:
  axonn-ext verify
  axonn-ext verify --json verify.json
  axonn-ext verify --only fused_sm90           the groups of fused_sm90
  axonn-ext verify --only "fused:,triton"      those of fused and of triton
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "verify", run, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--only", metavar="PATTERN[,...]",
        help="prefixes of the groups to run, separated by commas without spaces "
        "(default: all groups)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the results to a JSON file, updated after each group",
    )  # fmt: skip
    # The parent process, with which this one ends.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises UserError if there is no GPU."""
    if args.parent is not None:
        end_with(args.parent)
    here = settings.launch_environment()
    if here is not None and here.world_size > 1:
        raise UserError("verify starts its own processes; start it without torchrun or srun")
    if not any(True for pattern in DEVICE_FILES for _ in Path("/dev").glob(pattern)):
        raise UserError(NO_GPU.format("this machine has none"))
    return _verify(args.json, args.only)


def _verify(json_file: Path | None, only: str | None) -> int:
    from axonn_ext.terminal.files import check_writable
    from axonn_ext.terminal.rows import RowsFile
    from axonn_ext.verify.groups import groups
    from axonn_ext.verify.record import Record
    from axonn_ext.verify.run import FAILED

    num_gpus, gpu = find_gpus()
    all_groups = groups(num_gpus)
    asked = all_groups if only is None else groups_named(all_groups, only)
    check_writable("--json", json_file)
    console, key = Console(), key_of(gpu)
    start = time.monotonic()
    record, table = Record(key, all_groups), _table(console, asked)
    with RowsFile("--json", json_file) as file:
        for outcome in show_progress(console, gpu, asked):
            record.add(outcome)
            _show(table, outcome)
            file.write(_document(key, record))
    say(console, f"{time.monotonic() - start:.0f} s")
    if record.kept.path is not None:
        say(console, f"kept: {record.kept.path}")
    else:
        say(console, f"not kept, so that nothing changes for auto: {record.kept.why_not}")
    print_verdicts(console, record.verdicts, record.kept.known)
    return 1 if any(outcome.status == FAILED for outcome in record.outcomes) else 0


def groups_named(all_groups: Sequence[Group], patterns: str) -> list[Group]:
    """Returns the groups whose names begin with one of the patterns.

    Names also have commas, but with a space after them. Raises UserError for a pattern without a
    group.
    """
    # A space after a comma is part of a name.
    beginnings = re.split(r",(?! )", patterns)
    for beginning in beginnings:
        if not beginning or not any(g.name.startswith(beginning) for g in all_groups):
            names = "; ".join(group.name for group in all_groups)
            raise UserError(
                f"--only: expected how a group's name begins, got {beginning!r}; the groups here "
                f"are: {names}"
            )
    return [group for group in all_groups if group.name.startswith(tuple(beginnings))]


def find_gpus() -> tuple[int, str]:
    """Returns how many GPUs torch sees, and their model.

    Raises UserError if they cannot be verified.
    """
    import torch

    from axonn_ext.kernels import host

    if not host.runs_cuda():
        found = host.gpu_runtime()
        why = (
            f"torch is built for {found}" if found else "the torch that is installed is a CPU build"
        )
        raise UserError(NO_GPU.format(why))
    if not torch.cuda.is_available():
        raise UserError(NO_GPU.format("torch sees none here"))
    count = torch.cuda.device_count()
    models = {torch.cuda.get_device_name(device) for device in range(count)}
    if len(models) > 1:
        raise UserError(
            f"the GPUs here are of several models ({', '.join(sorted(models))}); verify one after "
            "the other with CUDA_VISIBLE_DEVICES"
        )
    return count, models.pop()


def key_of(gpu: str) -> Key | None:
    """Returns the key of the stamp; None if the driver's files do not have enough for it."""
    from axonn_ext.kernels import extension

    keys = extension.stamp_keys()
    return keys[0] if len(keys) == 1 else next((key for key in keys if key.gpu == gpu), None)


def show_progress(console: Console, gpu: str, groups: Sequence[Group]) -> Iterator[Outcome]:
    """Runs the groups and yields their outcomes, with a progress bar on a terminal."""
    from rich.progress import TimeElapsedColumn

    from axonn_ext.verify.run import run_groups

    with closing(Bar(console, len(groups), TimeElapsedColumn())) as bar:
        bar.show(f"{gpu}: {groups[0].name}")
        for number, outcome in enumerate(run_groups(groups), start=1):
            yield outcome
            bar.advance()
            bar.show(f"{gpu}: {groups[number].name if number < len(groups) else 'done'}")


def _table(console: Console, groups: Iterable[Group]) -> RowsTable:
    from axonn_ext.terminal.rows import Column, RowsTable
    from axonn_ext.verify.run import STATUSES

    columns = (
        Column("cases", max(len(group.name) for group in groups)),
        Column("", max(map(len, STATUSES))),
        Column("number", is_number=True), Column("seconds", is_number=True), Column("why"),
    )  # fmt: skip
    return RowsTable(console, columns)


def _show(table: RowsTable, outcome: Outcome) -> None:
    from axonn_ext.verify.run import FAILED, PASSED

    cells = (
        outcome.group.name, outcome.status, str(outcome.cases or ""), f"{outcome.seconds:.1f}",
        outcome.reason,
    )  # fmt: skip
    table.add(cells, {PASSED: "green", FAILED: "red"}.get(outcome.status, "yellow"))


def print_verdicts(
    console: Console, verdicts: Mapping[str, Verdict], known: Mapping[str, Verdict] | None
) -> None:
    """Prints the verdict on each kernel and, if it was kept (known), its effect on "auto"."""
    from axonn_ext.kernels.verified import KERNELS

    asked = settings.load().product_kernels
    for kernel in KERNELS:
        found = verdicts.get(kernel)
        words = (
            "not verified, see above" if found is None else "right" if found.passed else "FAILED"
        )
        if known is not None and kernel in known:
            words = f"{words}; {_effect(kernel, found, known[kernel], asked)}"
        say(console, f"{kernel}: {words}")


def _effect(kernel: str, found: Verdict | None, known: Verdict, asked: Sequence[str] | None) -> str:
    """Says what "auto" does, given the verdict on a kernel; asked: AXONN_PRODUCT_KERNELS."""
    from axonn_ext.kernels.verified import FUSED

    if not known.passed:
        old = "" if found and not found.passed else f"before, FAILED: {', '.join(known.reasons)}; "
        return f'{old}"auto" does not use it'
    old = "" if found else "before, right; "
    if kernel == FUSED and known.ranks == 1:
        return f'{old}between ranks on one GPU; for "auto" it must run between several'
    if kernel == FUSED:
        return f'{old}"auto" measures it in groups of up to {known.ranks} ranks'
    if asked is not None and kernel not in asked:
        return f'{old}"auto" does not measure it: AXONN_PRODUCT_KERNELS does not list it'
    return f'{old}"auto" measures it'


def _document(key: Key | None, record: Record) -> dict[str, Any]:
    """Returns the content of --json."""
    from axonn_ext.kernels.verified import as_document

    return {
        "key": asdict(key) if key else None,
        "stamp": str(record.kept.path) if record.kept.path else None,
        **as_document(record.verdicts),
        "groups": [asdict(outcome) for outcome in record.outcomes],
    }
