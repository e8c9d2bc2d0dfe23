"""`axonn-ext memorize`: how much of its training text a model repeats, and Goldfish loss."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_ext.cli import train
from axonn_ext.cli.memorize_evaluate import (
    CONFIG,
    Evaluation,
    hugging_face_folder,
    model_folder,
    without_stages,
)
from axonn_ext.cli.memorize_run import Experiment, name_of, size_overrides
from axonn_ext.inputs.errors import InputError
from axonn_ext.launch import process
from axonn_ext.memorization.documents import CONTINUED, MOST_TOKENS
from axonn_ext.memorization.experiment import Settings, all_repetitions
from axonn_ext.planner.model_files import read_config
from axonn_ext.terminal.arguments import MOST_THREADS, number, whole
from axonn_ext.terminal.errors import UserError, refuse_extra
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.grids import check_processes, parse_grid
from axonn_ext.train.config import MAX_SEED

SIZES = "128x4"
FROM_NOTHING, TRAINED_ON = "0,6,64,256", "0,1,4,6"
PER_BUCKET = 16
BACKGROUND = 4000  # generated documents
DEFAULT_LENGTH = 128  # of sequences, of models that are trained from nothing
LR, TRAINED_ON_LR = 2e-3, 3e-4
# Keys of the trainer that the experiment decides itself.
OWN_KEYS = (
    "checkpoint.", "data.", "goldfish.", "grid.", "lora.", "model.implementation",
    "model.pretrained", "model.sequence_length", "optim.lr", "train.batch_size", "train.eval_",
    "train.seed", "train.steps",
)  # fmt: skip

DESCRIPTION = """\
Measures how many documents a model repeats after it has seen them some number of times. A model is
trained twice on the same documents, in the same order: with the plain loss, and with Goldfish loss,
which leaves a fixed choice of the tokens out. Then it gets each document without its last 50 tokens
and continues it greedily; the document counts as repeated if all 50 come. Documents of the bucket 0
are never trained on: they are the control.

Without --model, a small model is trained from nothing on generated text. With --model, models that
are there are trained on. With --evaluate, a model is measured and nothing is trained."""

EPILOG = """\
examples:
  axonn-ext memorize --out runs/memorize
  axonn-ext memorize --sizes 64x2,128x4,192x6 --out runs/sizes
  axonn-ext memorize --model llama --documents articles.jsonl --grid z=4 --out runs/llama
  axonn-ext memorize --out runs/memorize --resume
  axonn-ext memorize --evaluate llama --documents articles.jsonl --json found.json

A line of a file of documents is {"text": "..."}, or {"tokens": [...]}, and may say how often the
document is seen: "repetitions": 4. Otherwise the documents are dealt to the buckets in turn. Those
of at most 50 tokens are left out, and longer ones are cut to a sequence, or 2,048 tokens.

The folder gets results.json, memorization.png and, for each model, the two runs of the trainer.
Every key of `axonn-ext train --help` that the experiment does not decide itself can be given as
--TABLE.KEY VALUE. docs/memorization.md explains the protocol and how to read the results.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "memorize", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="axonn-ext memorize [OPTION ...] [--TABLE.KEY VALUE ...]",
    )  # fmt: skip
    _add_models(parser)
    _add_documents(parser)
    _add_training(parser)
    folder = parser.add_argument_group("results")
    folder.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="of the experiment (default: runs/memorize-DATE-TIME)",
    )  # fmt: skip
    folder.add_argument(
        "--resume", action="store_true", help="go on with the experiment in --out FOLDER"
    )
    folder.add_argument(
        "--overwrite", action="store_true", help="replace the experiment in --out FOLDER"
    )
    folder.add_argument(
        "--json", type=Path, metavar="FILE", help="the results of --evaluate (default: none)"
    )
    parser.set_defaults(run=run)


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--sizes", metavar="HxL,...",
        help=f"hidden sizes and blocks of models that are trained from nothing (default: {SIZES})",
    )  # fmt: skip
    which.add_argument(
        "--model", action="append", metavar="FOLDER",
        help="is trained on: a Hugging Face folder, a checkpoint or a run; repeatable",
    )  # fmt: skip
    which.add_argument(
        "--evaluate", type=Path, metavar="FOLDER", help="is measured as it is; nothing is trained"
    )
    group.add_argument(
        "--grid", default="x=1", metavar="SHAPE",
        help="of processes: x=2,y=2,z=1,data=1,pipe=1 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--vocabulary", metavar="FILE",
        help="bytes, or a file of the tokenizers library (default: the model's tokenizer.json, or "
        "bytes from nothing)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="of --evaluate (default: auto)"
    )
    group.add_argument(
        "--threads", type=whole(0, MOST_THREADS), metavar="N",
        help="of each process of --evaluate (default: the host's cores shared out)",
    )  # fmt: skip


def _add_documents(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--documents", metavar="FILE", help="a .jsonl file of them (default: generated ones)"
    )
    group.add_argument(
        "--repetitions", metavar="N,...",
        help="how often the documents of each bucket are seen; the first is 0 (default: "
        f"{FROM_NOTHING} from nothing, {TRAINED_ON} with --model)",
    )  # fmt: skip
    group.add_argument(
        "--per-bucket", type=whole(), metavar="N",
        help=f"documents of a bucket, at most (default: {PER_BUCKET})",
    )  # fmt: skip
    group.add_argument(
        "--background", metavar="FILE|FOLDER",
        help="a text that is read once beside the documents; its last 5 %% are for validation",
    )  # fmt: skip
    group.add_argument(
        "--background-size", type=whole(0), metavar="N",
        help=f"documents of a generated background instead (default: {BACKGROUND} from nothing, "
        "else 0: the control is for validation)",
    )  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--goldfish-k", type=whole(2), metavar="K", help="one of K tokens is left out (default: 4)"
    )
    group.add_argument(
        "--goldfish-h", type=whole(1), metavar="H",
        help="tokens before it that decide whether it is (default: 13)",
    )  # fmt: skip
    group.add_argument(
        "--sequence-length", type=whole(CONTINUED + 1), metavar="N",
        help=f"tokens (default: {DEFAULT_LENGTH} from nothing, else as many as the model takes, up "
        f"to {MOST_TOKENS})",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=whole(), metavar="N", help="sequences of a step (default: 16)"
    )
    group.add_argument(
        "--lr", type=number(above=0), metavar="LR",
        help=f"highest learning rate (default: {LR:g} from nothing, {TRAINED_ON_LR:g} with "
        "--model)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=whole(0, MAX_SEED), metavar="N",
        help="of the weights, the generated text and the order (default: 0)",
    )  # fmt: skip


# What only an experiment takes, and what only --evaluate does.
_OF_EXPERIMENTS = (
    "repetitions", "per_bucket", "background", "background_size", "goldfish_k", "goldfish_h",
    "sequence_length", "batch_size", "lr", "seed", "out", "resume", "overwrite",
)  # fmt: skip
_OF_EVALUATION = ("json", "device", "threads")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command. Raises UserError for a mistake, TrainingError where a rank fails."""
    unused = _OF_EXPERIMENTS if args.evaluate else _OF_EVALUATION
    for name in unused:
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            where = "does not go with" if args.evaluate else "is only for"
            raise UserError(f"{option} {where} --evaluate")
    for name in ("documents", "background", "vocabulary"):
        if getattr(args, name) == "":
            raise UserError(f"--{name}: expected a name, got an empty one")
    if args.evaluate:
        refuse_extra("memorize", extra)
        _evaluate(args)
        return 0
    if process.this_process() is not None:
        raise UserError(
            "memorize starts its processes itself: give --grid, and leave torchrun out (which can "
            "run --evaluate)"
        )
    if args.resume and args.out is None:
        raise UserError("--resume goes on with the experiment in --out FOLDER: name that folder")
    if args.resume and args.overwrite:
        raise UserError("--resume and --overwrite: give one of them")
    shape = parse_grid("--grid", args.grid, pipe=True)
    check_processes(shape)
    folder = args.out or Path("runs") / f"memorize-{time.strftime('%Y%m%d-%H%M%S')}"
    experiment = Experiment(_settings(args, extra), folder, shape)
    experiment.run(resumes=args.resume, overwrite=args.overwrite)
    return 0


def _evaluate(args: argparse.Namespace) -> None:
    if args.documents is None:
        raise UserError("--evaluate needs --documents FILE")
    check_writable("--json", args.json)
    shape = without_stages(parse_grid("--grid", args.grid, pipe=True))
    with hugging_face_folder(args.evaluate) as folder:
        Evaluation(
            folder, Path(args.documents), shape, vocabulary=args.vocabulary,
            device=args.device or "auto", threads=args.threads or 0, out=args.json,
        ).run()  # fmt: skip


def _settings(args: argparse.Namespace, extra: Sequence[str]) -> Settings:
    """Returns the settings of an experiment. Raises UserError for what does not fit."""
    trains_on = bool(args.model)
    models = tuple(args.model or (args.sizes or SIZES).split(","))
    _check_models(models, trains_on=trains_on)
    overrides = train.parse_overrides(extra, "memorize")
    for override in overrides:
        if override.key.startswith(OWN_KEYS):
            raise UserError(
                f"--{override.key}: the experiment decides it itself (see axonn-ext memorize "
                "--help)"
            )
    if args.background and args.background_size:
        raise UserError("--background and --background-size: give one of them")
    size = args.background_size
    if size is None:
        size = 0 if trains_on or args.background else BACKGROUND
    if size == 1:
        raise UserError(
            "--background-size: expected 0, or at least 2, one of which is for validation, got 1"
        )
    return Settings(
        models=models, trains_on=trains_on,
        repetitions=_repetitions(args.repetitions or (TRAINED_ON if trains_on else FROM_NOTHING)),
        per_bucket=args.per_bucket or PER_BUCKET, documents=args.documents or "",
        background=args.background or "", background_size=size, vocabulary=args.vocabulary or "",
        sequence_length=args.sequence_length or _usual_length(args.model),
        batch_size=args.batch_size or 16, lr=args.lr or (TRAINED_ON_LR if trains_on else LR),
        seed=args.seed or 0, goldfish_k=args.goldfish_k or 4, goldfish_h=args.goldfish_h or 13,
        overrides=tuple((override.key, override.text) for override in overrides),
    )  # fmt: skip


def _check_models(models: Sequence[str], *, trains_on: bool) -> None:
    option = "--model" if trains_on else "--sizes"
    names = [name_of(model) for model in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{option}: expected models of different names, got {name} twice")
        if name in ("", ".."):
            raise UserError(f"{option}: expected a folder that has a name, got {models[0]}")
    if not trains_on:
        for model in models:
            size_overrides(model)


def _usual_length(folders: Sequence[str] | None) -> int:
    """Returns the tokens of a sequence, if they are not given."""
    lengths = [MOST_TOKENS if folders else DEFAULT_LENGTH]
    for folder in folders or ():
        found = model_folder(Path(folder))
        if found is None:
            raise UserError(
                f"--model {folder}: only the config.json of a Hugging Face folder says how long "
                "sequences can be: give --sequence-length for a checkpoint"
            )
        try:
            lengths.append(read_config(found / CONFIG).sequence_length)
        except InputError as error:
            raise UserError(f"--model: {error}") from None
    return min(lengths)


def _repetitions(text: str) -> tuple[int, ...]:
    try:
        return all_repetitions([int(part) for part in text.split(",")])
    except ValueError as error:
        reason = str(error) if "expected" in str(error) else f"expected N,N,..., got {text}"
        raise UserError(f"--repetitions: {reason}") from None
