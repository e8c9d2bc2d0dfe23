"""`axonn-ext checkpoint`: lists, checks, exports and rewrites checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import find_problems
from axonn_ext.checkpoint.folder import CHECKPOINTS, CheckpointFolder, find_checkpoint, last_good
from axonn_ext.checkpoint.manifest import Manifest
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.rewrite import reshard
from axonn_ext.spec.files.errors import InputError
from axonn_ext.terminal.arguments import new_parser, whole
from axonn_ext.terminal.console import Console, new_table, print_table, say
from axonn_ext.terminal.errors import TrainingError, UserError

MOST_FILES = 100_000
MOST_SECONDS = 1e11  # since 1970, the latest date that is shown
DESCRIPTION = """\
Works on checkpoints of `axonn-ext train` and axonn_ext.checkpoint.save. PATH is a checkpoint, or
the folder of a run or of checkpoints, which stands for its latest one."""

EPILOG = """\
examples:
  axonn-ext checkpoint list runs/demo
  axonn-ext checkpoint inspect runs/demo
  axonn-ext checkpoint verify runs/demo/checkpoints/step-00000200
  axonn-ext checkpoint export runs/demo my-model --dtype bf16     for transformers
  axonn-ext checkpoint reshard runs/demo copy --files 4
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand and its own subcommands."""
    parser = new_parser(commands, "checkpoint", run, description=DESCRIPTION, epilog=EPILOG)
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)

    def add(
        name: str, text: str, function: Callable[[argparse.Namespace], int],
        path: str = "checkpoint, or the folder of a run or of checkpoints, whose latest is used",
    ) -> Any:  # fmt: skip
        description = f"{text[0].upper()}{text[1:]}."
        action = actions.add_parser(name, help=text, description=description, allow_abbrev=False)
        action.add_argument("path", type=Path, metavar="PATH", help=path)
        action.set_defaults(function=function)
        return action

    add("list", "list the checkpoints of a run or of a folder", _list,
        "folder of a run or of checkpoints")  # fmt: skip
    inspect = add("inspect", "show what a checkpoint holds, without reading its tensors", _inspect)
    inspect.add_argument(
        "--tensors", action="store_true", help="also list the dtype and shape of each tensor"
    )
    add("verify", "read a whole checkpoint and name its damaged tensors", _verify)
    export = add(
        "export",
        "write the model for transformers: safetensors, config.json and the tokenizer",
        _export,
    )
    export.add_argument("out", type=Path, metavar="OUT", help="new folder for the model")
    export.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32",
        help="dtype of the exported weights (default: %(default)s)",
    )  # fmt: skip
    export.add_argument(
        "--weights", choices=("average", "last"), default="average",
        help="weights to export: their average, if the run keeps one (optim.ema_decay), or the "
        "last ones (default: %(default)s)",
    )  # fmt: skip
    export.add_argument(
        "--like", type=Path, metavar="FOLDER",
        help="copy of the model or tokenizer folder that the run started from, if the original "
        "has moved",
    )  # fmt: skip
    rewrite = add("reshard", "copy a checkpoint into another number of files", _reshard)
    rewrite.add_argument("out", type=Path, metavar="OUT", help="new folder for the copy")
    rewrite.add_argument(
        "--files", type=whole(1, MOST_FILES), default=1, metavar="N",
        help="number of files for the tensors (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the action. Raises UserError for a checkpoint that is missing or damaged."""
    try:
        return int(args.function(args))
    except (CheckpointError, InputError) as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise TrainingError(str(error)) from None


def _list(args: argparse.Namespace) -> int:
    folders = [CheckpointFolder(args.path / CHECKPOINTS), CheckpointFolder(args.path)]
    folder = next((each for each in folders if each.steps()), None)
    if folder is None:
        raise CheckpointError(f"{args.path}: expected a run, or a folder of checkpoints, got none")
    latest = folder.latest()
    table = new_table(("step", "written", "size", "grid", ""), ("written", "grid", ""), gap=4)
    for step in folder.steps():
        path = folder.path(step)
        mark = "latest" if path == latest else ""
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            table.add_row(f"{step:,}", "", "", "", f"damaged: {error}")
            continue
        table.add_row(f"{step:,}", *_summary(manifest), mark)
    print_table(Console(), table)
    return 0


def _summary(manifest: Manifest) -> tuple[str, str, str]:
    """Returns when it was written, its size, and the grid that wrote it."""
    seconds, written = manifest.facts.get("written"), "-"
    if isinstance(seconds, int | float) and 0 <= seconds < MOST_SECONDS:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return written, f"{manifest.num_bytes / 1e6:,.1f} MB", str(manifest.facts.get("grid", "-"))


def _inspect(args: argparse.Namespace) -> int:
    path = find_checkpoint(args.path)
    manifest = read_manifest(path)
    written, size, grid = _summary(manifest)
    kinds: dict[str, int] = {}
    for name in manifest.tensors:
        kind = name.partition(".")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    lines = {
        "checkpoint": str(path),
        "step": str(manifest.facts.get("step", "-")),
        "written": f"{written}, by axonn_ext {manifest.facts.get('axonn_ext', '?')}",
        "grid": grid,
        "size": f"{size} in {len(manifest.files)} files",
        "tensors": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "extra": ", ".join(map(str, manifest.extra)) or "nothing",
    }
    for name, value in lines.items():
        say(Console(), f"{name:>10}  {value}")
    if args.tensors:
        say(Console(), "")
        for name, tensor in manifest.tensors.items():
            shape = " x ".join(map(str, tensor.shape)) or "one number"
            count = tensor.layout.num_blocks
            blocks = "1 block" if count == 1 else f"{count} blocks"
            say(Console(), f"{name}  {tensor.dtype}  {shape}  in {blocks}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Returns 1 if something is damaged."""
    path = find_checkpoint(args.path)
    manifest = read_manifest(path)
    files = track(manifest.files, "reading", console=Console(stderr=True), transient=True)
    problems = list(find_problems(path, manifest, files))
    for problem in problems:
        say(Console(), problem)
    if problems:
        good = last_good(path)
        say(Console(), f"the newest other one that is whole: {good or 'there is none'}")
        return 1
    say(
        Console(), f"{path}: all {len(manifest.tensors)} tensors are whole, {_summary(manifest)[1]}"
    )
    return 0


def _export(args: argparse.Namespace) -> int:
    from axonn_ext.train.export import export  # loads Torch's distributed part

    path = find_checkpoint(args.path)
    if args.out.exists():
        raise UserError(f"OUT: expected a new folder, got {args.out}, which exists")
    average = args.weights == "average"
    config = export(path, args.out, dtype=args.dtype, like=args.like, average=average)
    say(
        Console(),
        f"{args.out}: {config.family}, {config.num_parameters():,} parameters in {args.dtype}; "
        f'transformers.AutoModelForCausalLM.from_pretrained("{args.out}") loads it',
    )
    return 0


def _reshard(args: argparse.Namespace) -> int:
    manifest = reshard(find_checkpoint(args.path), args.out, num_files=args.files)
    say(Console(), f"{args.out}: {_summary(manifest)[1]} in {len(manifest.files)} files")
    return 0
