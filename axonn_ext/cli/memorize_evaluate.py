"""The part of `axonn-ext memorize` that measures an existing model on a grid of processes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from axonn_ext import Grid
from axonn_ext.checkpoint import CheckpointError
from axonn_ext.checkpoint.folder import find_checkpoint
from axonn_ext.cli.model_on_grid import (
    check_grid,
    check_started,
    device_of,
    load_model,
    model_vocabulary,
)
from axonn_ext.data import Prompts
from axonn_ext.models import ModelConfig
from axonn_ext.models.pretrained import read_model
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import is_file
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.console import Console, print_table, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import write_text
from axonn_ext.train.export import export
from axonn_ext.train.memorization.documents import (
    CONTINUED,
    MOST_TOKENS,
    Document,
    check_documents,
    read_documents,
)
from axonn_ext.train.memorization.report import bucket_table
from axonn_ext.train.memorization.results import BucketResult, measure
from axonn_ext.train.run_folder import MODEL

CONFIG = "config.json"


@dataclass(frozen=True)
class Evaluation:
    """A model to measure, and its inputs.

    folder: in Hugging Face format. documents: a .jsonl file. vocabulary: for texts; None: the
    model's. threads: per process; 0: its share of the host's cores. out: JSON file for the results.
    """

    folder: Path
    documents: Path
    shape: GridShape
    vocabulary: str | None = None
    device: str = "auto"
    threads: int = 0
    out: Path | None = None

    def run(self) -> None:
        """Measures the model and shows the result, in as many processes as the grid has.

        Raises UserError for inconsistent inputs, and TrainingError if a process fails.
        """
        here = process.this_process()
        config, documents = self._check()
        if here is None and self.shape.size > 1:
            launch(self.shape.size, ["memorize", *self._arguments()])
            return
        check_started(self.shape, here)
        self._measure(config, documents, here or Process())

    def _check(self) -> tuple[ModelConfig, list[Document]]:
        """Returns the model and the documents. Raises UserError if they or the grid do not fit."""
        device_of(self.device)
        try:
            config = read_model(self.folder)
            check_grid(config, self.shape)
            most = min(MOST_TOKENS, config.sequence_length)
            # A file of tokens needs no vocabulary, so it is opened only for the first text.
            prompts = cache(lambda: Prompts(model_vocabulary(self.folder, self.vocabulary)))
            documents, num_short = read_documents(
                self.documents, lambda text: prompts().prompt(text), most_tokens=most
            )
            check_documents(documents, config.sequence_length, config.vocab_size)
        except ValueError as error:
            raise UserError(str(error)) from None
        here = process.this_process()
        if num_short and (here is None or here.world_size == 1):
            text = f"left out: {num_short} documents of at most {CONTINUED} tokens"
            say(Console(stderr=True), text)
        return config, documents

    def _measure(self, config: ModelConfig, documents: list[Document], here: Process) -> None:
        device = device_of(self.device)
        store = process.open_store(here)
        process.meet(store, here, lambda: self._shared_values(documents, device))
        process.set_threads(here, self.threads)
        progress = _Progress(len(documents)) if here.rank == 0 else None
        with process.process_group(here, store, device):
            longest = max(len(document.tokens) for document in documents)
            model = load_model(
                self.folder, Grid(**self.shape.as_dict()), device=device,
                sequence_length=longest if config.traits.rotary else None,
            )  # fmt: skip
            try:
                found = measure(model, documents, progress or _silent)
            except ValueError as error:
                raise UserError(str(error)) from None
        if here.rank == 0:
            self._show(found)

    def _shared_values(self, documents: list[Document], device: str) -> dict[str, str]:
        """Returns what ranks must agree on; from_pretrained compares the model's files."""
        tokens = [(document.tokens, document.repetitions) for document in documents]
        return {
            "the command": "memorize --evaluate", "--grid": str(self.shape), "--device": device,
            "--documents": str(tokens),
        }  # fmt: skip

    def _show(self, found: list[BucketResult]) -> None:
        print_table(Console(), bucket_table(found))
        if self.out is not None:
            text = json.dumps({"buckets": [bucket.as_json() for bucket in found]}, indent=1)
            write_text("--json", self.out, text + "\n")

    def _arguments(self) -> list[str]:
        """Returns the arguments of the started processes."""
        values = {
            "evaluate": self.folder, "documents": self.documents, "grid": self.shape,
            "vocabulary": self.vocabulary, "device": self.device, "threads": self.threads,
            "json": self.out,
        }  # fmt: skip
        return [f"--{name}={value}" for name, value in values.items() if value is not None]


def without_stages(shape: GridShape) -> GridShape:
    """Returns a grid of the same size with model replicas in place of pipeline stages.

    A token is generated by all blocks one after the other, so stages would wait in turn.
    """
    return GridShape(shape.x, shape.y, shape.z, shape.data * shape.pipe)


def model_folder(path: Path) -> Path | None:
    """Returns the Hugging Face folder that a path means: itself, or the one in a run's folder."""
    return next((f for f in (path, path / MODEL) if is_file(f / CONFIG)), None)


@contextmanager
def hugging_face_folder(path: Path) -> Iterator[Path]:
    """Yields the folder of a model; a checkpoint is exported into a temporary one.

    Raises UserError if there is no model.
    """
    found = model_folder(path)
    if found is not None:
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="axonn_ext_") as place:
        folder = Path(place) / MODEL
        export_model(path, folder, "fp32")
        yield folder


def found_checkpoint(path: Path) -> Path:
    """Returns the checkpoint that a path means. Raises UserError if there is none."""
    try:
        return find_checkpoint(path)
    except (CheckpointError, OSError) as error:  # no file can have a name of thousands of letters
        raise UserError(
            f"{path}: expected a Hugging Face folder, a checkpoint or the folder of a run; {error}"
        ) from None


def export_model(path: Path, out: Path, dtype: str) -> None:
    """Writes the model of a checkpoint for transformers. Raises UserError if that fails."""
    try:
        export(found_checkpoint(path), out, dtype=dtype, strict=False)
    except (CheckpointError, InputError) as error:
        raise UserError(str(error)) from None


class _Progress:
    """Says how many documents are done."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._console = Console(stderr=True)

    def __call__(self, count: int) -> None:
        self._done += count
        say(self._console, f"continued {self._done} of {self._total} documents")


def _silent(count: int) -> None:
    """The progress callback of all ranks but one."""
