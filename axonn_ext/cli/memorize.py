"""`axonn-ext memorize`: how much of its training text a model repeats, and Goldfish loss."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_ext.cli import train
from axonn_ext.cli.memorize_arguments import (
    BACKGROUND,
    BATCH_SIZE,
    DEFAULT_LENGTH,
    DESCRIPTION,
    EPILOG,
    FROM_NOTHING,
    LR,
    OF_EVALUATION,
    OF_EXPERIMENTS,
    PER_BUCKET,
    SIZES,
    TRAINED_ON,
    TRAINED_ON_LR,
    add_options,
)
from axonn_ext.cli.memorize_evaluate import (
    CONFIG,
    Evaluation,
    hugging_face_folder,
    model_folder,
    without_stages,
)
from axonn_ext.cli.memorize_run import Experiment, name_of, size_overrides
from axonn_ext.ranks.launch import process
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.goldfish import Goldfish
from axonn_ext.spec.model_files import read_config
from axonn_ext.terminal.arguments import new_parser
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable
from axonn_ext.terminal.grids import check_processes, parse_grid
from axonn_ext.train.claim import claimed
from axonn_ext.train.memorization.documents import MOST_TOKENS
from axonn_ext.train.memorization.experiment import Settings, all_repetitions

# Keys of the trainer that the experiment sets itself.
OWN_KEYS = (
    "checkpoint.", "data.", "goldfish.", "grid.", "lora.", "model.hidden_size",
    "model.implementation", "model.num_layers", "model.pretrained", "model.sequence_length",
    "optim.lr", "train.batch_size", "train.eval_", "train.seed", "train.steps",
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        commands, "memorize", run, keys=train.all_keys, description=DESCRIPTION, epilog=EPILOG,
        usage="axonn-ext memorize [OPTION ...] [--TABLE.KEY VALUE ...]",
    )  # fmt: skip
    add_options(parser)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command. Raises UserError for a mistake, TrainingError if a rank fails."""
    unused = OF_EXPERIMENTS if args.evaluate else OF_EVALUATION
    for name in unused:
        given = getattr(args, name)
        if given is not None and given is not False:  # 0 also counts as given
            option = f"--{name.replace('_', '-')}"
            where = "does not go with" if args.evaluate else "is only for"
            raise UserError(f"{option} {where} --evaluate")
    for name in ("documents", "background", "vocabulary"):
        if getattr(args, name) == "":
            raise UserError(f"--{name}: expected a name, got an empty one")
    if args.evaluate:
        if extra:
            raise UserError(f"{extra[0]} does not go with --evaluate")
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
    with claimed(folder):
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
    """Returns the settings of an experiment. Raises UserError if they are inconsistent."""
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
        batch_size=args.batch_size or BATCH_SIZE, seed=args.seed or 0,
        lr=args.lr or (TRAINED_ON_LR if trains_on else LR),
        goldfish_k=args.goldfish_k or Goldfish.k, goldfish_h=args.goldfish_h or Goldfish.h,
        goldfish_window=args.goldfish_window or Goldfish.window,
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
    """Returns the default number of tokens per sequence."""
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
