"""The part of `axonn-ext memorize` that trains both arms of an experiment and shows the result."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from axonn_ext.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from axonn_ext.cli import train
from axonn_ext.cli.memorize_evaluate import (
    CONFIG,
    Evaluation,
    export_model,
    found_checkpoint,
    model_folder,
    without_stages,
)
from axonn_ext.cli.model_on_grid import model_vocabulary
from axonn_ext.data import Vocabulary, open_vocabulary
from axonn_ext.data.vocabulary import BYTES
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import is_file, read_json
from axonn_ext.spec.files.token_files import TokenFiles
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model_files import read_config
from axonn_ext.terminal.console import Console, print_table, say
from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.terminal.files import make_folder, write_text, writing
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import load_config
from axonn_ext.train.job import prepare
from axonn_ext.train.memorization.documents import CONTINUED, write_documents
from axonn_ext.train.memorization.experiment import Exposures, Settings
from axonn_ext.train.memorization.plot import plot_arms
from axonn_ext.train.memorization.report import arms_table, summary
from axonn_ext.train.memorization.results import ARMS, GOLDFISH, ArmResult, read_buckets
from axonn_ext.train.metrics import read_metrics
from axonn_ext.train.run_folder import MODEL, check_folder

SETTINGS, RESULTS, PICTURE = "experiment.json", "results.json", "memorization.png"
DOCUMENTS, TRAINING, BUCKETS = "documents.jsonl", "training", "extraction.json"
START = "start"  # folder of the initial model, exported from a checkpoint
HEAD_SIZE = 32  # features per head in models trained from scratch
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3})")
_EVALUATIONS, _CHECKPOINTS = 8, 10  # per run


def goldfish_overrides(settings: Settings) -> dict[str, object]:
    """Returns the keys of the trainer that turn Goldfish loss on."""
    return {
        "goldfish.k": settings.goldfish_k, "goldfish.h": settings.goldfish_h,
        "goldfish.window": settings.goldfish_window,
    }  # fmt: skip


@dataclass(frozen=True)
class _Arm:
    """A model to train in one arm, with the trainer's options for it."""

    model: str
    name: str
    options: tuple[str, ...]
    config: Config


@dataclass(frozen=True)
class Experiment:
    """The settings of an experiment, its folder, and the grid of its processes."""

    settings: Settings
    folder: Path
    grid: GridShape

    def run(self, *, resumes: bool, overwrite: bool) -> None:
        """Trains and measures every model in both arms, writes the files and shows the result.

        resumes: whether to keep the results in the folder from an earlier run with the same
        settings. Raises UserError for inconsistent inputs, and TrainingError if a process fails.
        """
        console = Console()
        data = {name: self._data(name) for name in self.settings.models}  # before all else
        read = {name_of(name): exposures.sha256 for name, (_, exposures) in data.items()}
        self._prepare(read, resumes=resumes, overwrite=overwrite)
        # All arms are checked before the first is trained.
        arms = [arm for name, mine in data.items() for arm in self._arms(name, *mine)]
        found: list[ArmResult] = []
        for number, arm in enumerate(arms):
            which = f"arm {number % len(ARMS) + 1} of {len(ARMS)}: {arm.name}"
            say(console, f"\n{name_of(arm.model)}, {which}", "bold")
            found.append(self._run_arm(arm))
        results = {"settings": asdict(self.settings), "arms": [arm.as_json() for arm in found]}
        write_text("--out", self.folder / RESULTS, json.dumps(results, indent=1) + "\n")
        console.print()
        print_table(console, arms_table(found))
        console.print()
        for line in summary(found):
            say(console, line)
        say(console, "written: " + ", ".join(map(str, self._pictured(found, console))))

    def _data(self, name: str) -> tuple[Vocabulary, Exposures]:
        """Returns a model's training data. Raises UserError for data that do not fit."""
        settings = self.settings
        try:
            if settings.trains_on:
                folder = model_folder(Path(name)) or found_checkpoint(Path(name))
                vocabulary = model_vocabulary(folder, settings.vocabulary or None)
            else:
                vocabulary = open_vocabulary(settings.vocabulary or BYTES)
        except ValueError as error:
            raise UserError(f"--vocabulary: {error}") from None
        try:
            return vocabulary, Exposures.of(settings, vocabulary)
        except ValueError as error:
            raise UserError(str(error)) from None

    def _prepare(self, read: Mapping[str, str], *, resumes: bool, overwrite: bool) -> None:
        """Makes the folder, or checks that the experiment in it is this one.

        read: the digest of each model's training data.
        """
        self._refuse_inputs_inside()
        path = self.folder / SETTINGS
        try:
            old = list(_folders_of(path)) if is_file(path) else []
            begun = any((self.folder / model / arm).is_dir() for model in old for arm in ARMS)
            if resumes and begun:
                self.settings.check_saved(path, read)
                return
        except InputError as error:
            raise UserError(f"--out: {error}") from None
        check_folder(self.folder, overwrite=is_file(path) and (overwrite or not begun))
        make_folder("--out", self.folder)
        for model in old:
            shutil.rmtree(self.folder / model, ignore_errors=True)
        with writing("--out", path):
            self.settings.save(path, read)

    def _refuse_inputs_inside(self) -> None:
        """Raises UserError for an input in the folder of the experiment, which may be replaced."""
        settings = self.settings
        models = settings.models if settings.trains_on else ()
        given = [("--model", model) for model in models]
        given += [("--documents", settings.documents), ("--background", settings.background),
                  ("--vocabulary", settings.vocabulary)]  # fmt: skip
        for option, path in given:
            if path and self.folder.resolve() in Path(path).resolve().parents:
                raise UserError(
                    f"{option} {path}: expected a path that is not in --out {self.folder}, whose "
                    "files the experiment writes"
                )

    def _arms(self, name: str, vocabulary: Vocabulary, exposures: Exposures) -> Iterator[_Arm]:
        """Writes a model's training data; yields its arms. Raises UserError if one cannot run."""
        folder, used = self.folder / name_of(name), len(exposures.documents)
        if used < exposures.num_given:
            say(
                Console(stderr=True),
                f"{name_of(name)}: {used} of {exposures.num_given} documents are used; the others "
                f"have at most {CONTINUED} tokens, are of no bucket, or are more than --per-bucket",
            )
        make_folder("--out", folder)
        start = _start(Path(name), folder) if self.settings.trains_on else None
        with writing("--out", folder / DOCUMENTS):
            write_documents(folder / DOCUMENTS, exposures.documents)
            exposures.write(TokenFiles(folder / TRAINING), vocabulary)
        for arm in ARMS:
            overrides = self._overrides(name, start, arm, exposures)
            options = tuple(f"--{key}={value}" for key, value in overrides.items())
            given = train.parse_overrides(options)
            config = load_config(None, grid=str(self.grid), overrides=given)
            prepare(config, world_size=self.grid.size)
            yield _Arm(name, arm, options, config)

    def _run_arm(self, arm: _Arm) -> ArmResult:
        """Trains and measures a model in one arm, or reads its earlier result."""
        root, config = self.folder / name_of(arm.model), arm.config
        run = root / arm.name
        if not is_file(run / BUCKETS):
            _train(run, str(self.grid), arm.options)
            model = _trained_model(run, config)
            partial = run / f".{BUCKETS}.new"
            Evaluation(
                model, root / DOCUMENTS, without_stages(self.grid), device=config.train.device,
                threads=config.train.threads, out=partial,
            ).run()  # fmt: skip
            with writing("--out", run / BUCKETS):
                partial.replace(run / BUCKETS)
        try:
            parameters = read_config(run / MODEL / CONFIG).num_parameters()
            losses = {each.step: each.eval_loss for each in read_metrics(run).evaluations}
            return ArmResult(
                name_of(arm.model), parameters, arm.name, config.train.steps,
                tuple(losses.items()), read_buckets(run / BUCKETS),
            )  # fmt: skip
        except InputError as error:
            raise UserError(f"--out: {error}") from None

    def _overrides(
        self, name: str, start: Path | None, arm: str, exposures: Exposures
    ) -> dict[str, object]:
        """Returns the keys of the trainer for one arm; the user's replace others."""
        settings = self.settings
        steps = exposures.num_steps(batch_size=settings.batch_size, seed=settings.seed)
        values: dict[str, object] = {
            "optim.lr": settings.lr, "optim.warmup_steps": max(1, min(50, steps // 10)),
            "train.eval_interval": max(1, steps // _EVALUATIONS),
            "checkpoint.interval": max(1, steps // _CHECKPOINTS), "checkpoint.keep_last": 1,
        }  # fmt: skip
        values |= {"model.pretrained": start} if start else size_overrides(name)
        values |= dict(settings.overrides)
        return values | {
            "data.text": self.folder / name_of(name) / TRAINING, "data.order": "examples",
            "data.vocabulary": "bytes", "data.epochs": 1, "data.held_out": exposures.held_out,
            "model.sequence_length": settings.sequence_length,
            "train.batch_size": settings.batch_size, "train.seed": settings.seed,
            "train.steps": steps, "train.eval_batches": len(exposures.validation),
            **(goldfish_overrides(settings) if arm == GOLDFISH else {}),
        }  # fmt: skip

    def _pictured(self, arms: list[ArmResult], console: Console) -> list[Path]:
        """Draws the picture, if matplotlib is installed; returns the files with the results."""
        settings, path = self.settings, self.folder / PICTURE
        if not importlib.util.find_spec("matplotlib"):
            say(console, f"no {PICTURE}: that needs matplotlib (pip install matplotlib)")
            return [self.folder / RESULTS]
        how = "trained on" if settings.trains_on else "trained from scratch"
        sizes = sorted({bucket.documents for arm in arms for bucket in arm.buckets})
        with writing("--out", path):
            plot_arms(
                arms, path, title="Memorisation with the plain loss and with Goldfish loss",
                subtitle=f"{', '.join(map(name_of, settings.models))}, {how}; Goldfish k = "
                f"{settings.goldfish_k}, h = {settings.goldfish_h}; {' or '.join(map(str, sizes))} "
                "documents a bucket; bars: 95 % intervals",
            )  # fmt: skip
        return [self.folder / RESULTS, path]


def name_of(model: str) -> str:
    """Returns a model's name in an experiment: its size, or the name of its folder."""
    return Path(model).name


def size_overrides(size: str) -> dict[str, object]:
    """Returns the trainer's keys for a Llama of size HIDDENxLAYERS. Raises UserError."""
    match = _SIZE.fullmatch(size)
    if match is None or int(match[1]) % HEAD_SIZE:
        raise UserError(
            f"--sizes: expected HIDDENxLAYERS such as 128x4, HIDDEN a multiple of {HEAD_SIZE}, "
            f"got {size}"
        )
    hidden, layers = int(match[1]), int(match[2])
    return {
        "model.family": "llama", "model.hidden_size": hidden, "model.num_layers": layers,
        "model.num_heads": hidden // HEAD_SIZE,
    }  # fmt: skip


def _start(model: Path, folder: Path) -> Path:
    """Returns the Hugging Face folder of a model; a checkpoint is exported into `folder`."""
    found = model_folder(model)
    if found is not None:
        return found
    start = folder / START
    if not is_file(start / CONFIG):
        _export(model, start, "fp32")
    return start


def _train(folder: Path, grid: str, options: Sequence[str]) -> None:
    """Runs `axonn-ext train`, from the last checkpoint in the folder if there is one."""
    arguments = argparse.Namespace(
        config=None, grid=grid, machine=None, nproc=None, resume="auto", out=folder,
        overwrite=False, profile=False, print_config=False,
    )  # fmt: skip
    try:
        train.run(arguments, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command with --resume goes on") from None


def _trained_model(run: Path, config: Config) -> Path:
    """Returns the folder of the model of a finished run. Raises TrainingError for any other."""
    steps = CheckpointFolder(run / CHECKPOINTS).steps()
    if not steps or steps[-1] < config.train.steps:
        raise TrainingError(
            f"the run in {run} ended after step {max(steps, default=0)} of {config.train.steps}; "
            "--resume goes on with it"
        )
    if not is_file(run / MODEL / CONFIG):
        _export(run, run / MODEL, config.train.dtype)
    return run / MODEL


def _export(path: Path, out: Path, dtype: str) -> None:
    """Exports a checkpoint; leaves no folder if interrupted."""
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    export_model(path, fresh, dtype)
    fresh.rename(out)


def _folders_of(path: Path) -> Iterator[str]:
    """Yields the folders of the models of an earlier experiment. Raises InputError."""
    saved = read_json(path)
    models = saved.get("models") if isinstance(saved, dict) else None
    for model in models if isinstance(models, list) else ():
        if isinstance(model, str) and name_of(model) not in ("", ".."):
            yield name_of(model)
