"""`axonn-ext verify`: checks the kernels on this machine's GPUs, and keeps the results."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_ext import settings
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError, refuse_extra

if TYPE_CHECKING:
    from axonn_ext.stamps import Key, Verdict
    from axonn_ext.verify.run import Outcome

# Device files of the drivers of NVIDIA, Tegra, Windows (WSL) and AMD. If there are none, there is
# no GPU, which we then know without loading Torch.
DEVICE_FILES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")
NO_GPU = (
    "axonn-ext verify needs an NVIDIA GPU, and {}: run it where the job will run. Nothing needs it "
    "on CPUs"
)

DESCRIPTION = """\
Runs the fused ops and the kernels that compete for matrix products on the GPUs of this machine,
on random data beside float64 references, each group of cases in processes of its own, in under 3
minutes. What is right is kept in AXONN_CACHE_DIR, for GPUs of this model and the installed driver,
torch, NCCL, triton and axonn_ext: algorithm "auto" then measures "fused" and "fused_sm90", too.
What is wrong is kept as well, and not used. Exit status: 0 nothing failed, 1 something did, 2
there is no GPU."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "verify", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command; raises UserError where there is no GPU."""
    refuse_extra("verify", extra)
    here = settings.launch_environment()
    if here is not None and here.world_size > 1:
        raise UserError("verify starts its own processes; start it without torchrun")
    if not any(True for pattern in DEVICE_FILES for _ in Path("/dev").glob(pattern)):
        raise UserError(NO_GPU.format("this machine has none"))
    return _verify(args.json)


def _verify(json_file: Path | None) -> int:
    from axonn_ext.terminal.console import Console
    from axonn_ext.terminal.files import check_writable
    from axonn_ext.verify.groups import groups
    from axonn_ext.verify.run import FAILED, PASSED, verdicts_of

    num_gpus, gpu = find_gpus()
    check_writable("--json", json_file)
    console = Console()
    start = time.monotonic()
    outcomes = show_progress(console, gpu, groups(num_gpus))
    verdicts = verdicts_of(outcomes)
    key = key_of(gpu)
    console.print(table_of(outcomes))
    say(console, f"{time.monotonic() - start:.0f} s")
    passed = {outcome.group.name for outcome in outcomes if outcome.status == PASSED}
    stamp, known = keep(console, key, verdicts, passed=passed)
    print_verdicts(console, verdicts, known)
    if json_file is not None:
        _write_json(json_file, key, stamp, verdicts, outcomes)
    return 1 if any(outcome.status == FAILED for outcome in outcomes) else 0


def find_gpus() -> tuple[int, str]:
    """Returns how many GPUs torch sees, and their model.

    Raises UserError if they cannot be verified.
    """
    import torch

    from axonn_ext import _machine

    if not _machine.runs_cuda():
        found = _machine.gpu_runtime()
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
    """Returns the key of the stamp; None if the driver's files do not tell enough to find it."""
    from axonn_ext import _library

    keys = _library.stamp_keys()
    return keys[0] if len(keys) == 1 else next((key for key in keys if key.gpu == gpu), None)


def show_progress(console: Console, gpu: str, groups: Sequence[Any]) -> list[Outcome]:
    """Runs the groups, with a bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from axonn_ext.verify.run import run_groups

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    outcomes = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{gpu}: {groups[0].name}", total=len(groups))
        for number, outcome in enumerate(run_groups(groups), start=1):
            outcomes.append(outcome)
            next_name = groups[number].name if number < len(groups) else "done"
            progress.update(task, advance=1, description=f"{gpu}: {next_name}")
    return outcomes


def table_of(outcomes: Iterable[Outcome]) -> Any:
    """Returns a table with a row for each group."""
    from rich.text import Text

    from axonn_ext.terminal.console import plain_table
    from axonn_ext.verify.run import FAILED, PASSED

    table = plain_table()
    for column in ("cases", "", "number", "seconds", "why"):
        table.add_column(column, justify="right" if column in ("number", "seconds") else "left")
    styles = {PASSED: "green", FAILED: "red"}
    for outcome in outcomes:
        table.add_row(
            outcome.group.name,
            Text(outcome.status, style=styles.get(outcome.status, "yellow")),
            str(outcome.cases or ""),
            f"{outcome.seconds:.1f}",
            Text(outcome.reason),
        )
    return table


def print_verdicts(
    console: Console, verdicts: Mapping[str, Verdict], known: Mapping[str, Verdict] | None
) -> None:
    """Prints the verdict on each kernel and, if it was kept (known), its effect on "auto"."""
    from axonn_ext.stamps import KERNELS

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
    from axonn_ext.stamps import FUSED

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


def keep(
    console: Console, key: Key | None, verdicts: Mapping[str, Verdict], *, passed: Collection[str]
) -> tuple[Path | None, dict[str, Verdict] | None]:
    """Writes all verdicts so far into the stamp, or prints why there is none."""
    from axonn_ext import stamps

    cache_dir = settings.load().cache_dir
    if key is None:
        why = f"{_driver_folder()} does not tell this GPU's model, by which it would be found"
    elif not cache_dir:
        why = "AXONN_CACHE_DIR is empty"
    else:
        old = stamps.find(cache_dir, key)
        known = stamps.merged(old.verdicts if old else {}, verdicts, passed=passed)
        try:
            path = stamps.keep(cache_dir, stamps.Stamp(key, known))
        except OSError as error:
            why = f"{error.filename or cache_dir}: {error.strerror}"
        else:
            say(console, f"kept: {path}")
            return path, known
    say(console, f"not kept, so that nothing changes for auto: {why}")
    return None, None


def _driver_folder() -> Path:
    from axonn_ext import _machine

    return _machine.DRIVER


def _write_json(
    path: Path,
    key: Key | None,
    stamp: Path | None,
    verdicts: Mapping[str, Verdict],
    outcomes: Sequence[Outcome],
) -> None:
    from axonn_ext.stamps import as_document
    from axonn_ext.terminal.files import write_text

    document = {
        "key": asdict(key) if key else None,
        "stamp": str(stamp) if stamp else None,
        **as_document(verdicts),
        "groups": [asdict(outcome) for outcome in outcomes],
    }
    write_text("--json", path, json.dumps(document, indent=1) + "\n")
