"""Writes the model of a run or checkpoint in transformers' format, with its tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed import HashStore

import axonn_ext
from axonn_ext import models
from axonn_ext.checkpoint import CheckpointError, load
from axonn_ext.checkpoint.files import remove
from axonn_ext.checkpoint.manifest import Manifest
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.state import model_shards
from axonn_ext.checkpoint.storage import read_shards
from axonn_ext.data import StoredVocabulary
from axonn_ext.data.source import expand_home
from axonn_ext.data.tokenizer_files import TOKENIZER
from axonn_ext.data.vocabulary import BYTES
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.transformer import Transformer
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import is_file, is_folder
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.train.config import LoraTable
from axonn_ext.train.job import DTYPES, Job
from axonn_ext.train.model import add_adapters
from axonn_ext.train.run_folder import ADAPTER, MODEL

ORIGINS = "origins"  # the key of a checkpoint for what follows


@dataclass(frozen=True)
class Origins:
    """Where a run's model and tokenizer come from.

    pretrained    the folder of the model; "": trained from scratch
    tokenizer     its file, or "bytes"; "": the model's, or unknown
    """

    pretrained: str
    tokenizer: str

    @classmethod
    def of(cls, job: Job) -> Origins:
        """Returns a run's origins, as paths that are valid in any working directory."""
        base, name = job.config.model.pretrained, job.config.data.vocabulary
        if isinstance(job.text.vocabulary, StoredVocabulary):
            name = ""
        elif not name and not base:
            name = BYTES
        elif name not in ("", BYTES):
            name = str(expand_home(name).resolve())
        return cls(str(Path(base).resolve()) if base else "", name)

    def found(self, like: Path | None) -> Origins:
        """Returns these origins, or the copy in `like`. Raises CheckpointError if not found."""
        place = self
        if like is not None:
            tokenizer = self.tokenizer if self.tokenizer in ("", BYTES) else str(like / TOKENIZER)
            place = Origins(str(like) if self.pretrained else "", tokenizer)
        for name in (place.pretrained, place.tokenizer):
            if name not in ("", BYTES) and not (is_folder(Path(name)) or is_file(Path(name))):
                raise CheckpointError(
                    f"the run began with {name}, whose tokenizer and special tokens belong to the "
                    "export, but it is not there; bring it back, or give --like FOLDER with a copy"
                )
        return place


def save_trained(job: Job, module: nn.Module, folder: Path, *, rank: int) -> Path | None:
    """Writes a model that began as a pretrained one; returns its folder. All ranks call it.

    folder: the run's. Raises TrainingError if writing fails.
    """
    lora, base = job.config.lora.rank > 0, job.config.model.pretrained
    if not base or not isinstance(module, Transformer):
        return None
    saved = folder / (ADAPTER if lora else MODEL)
    fresh = saved.with_name(f".{saved.name}.new")
    if rank == 0:
        remove(fresh)
    try:
        if lora:
            axonn_ext.save_adapter(module, fresh, base=str(Path(base).resolve()))
        else:
            tokenizer = Origins.of(job).tokenizer or None
            axonn_ext.save_pretrained(module, fresh, like=base, tokenizer=tokenizer)
        if rank == 0:  # the run that this one continues may have written one
            remove(saved)
            fresh.rename(saved)
    except (InputError, OSError) as error:
        raise TrainingError(str(error)) from None
    return saved


def export(
    checkpoint: Path, out: Path, *, dtype: str, like: Path | None = None, strict: bool = True,
    average: bool = True,
) -> ModelConfig:  # fmt: skip
    """Writes the model to a new folder as `save_pretrained` does; returns its description.

    average: write the averages of the weights, if the run keeps them (optim.ema_decay).
    like: a copy of the folder that the run started from, if that one no longer exists. strict: the
    files that the run started from must exist; otherwise missing ones are left out.

    Holds the whole model in memory, in the given dtype, with its adapters, if any, merged. Raises
    CheckpointError for a checkpoint that is damaged or that `axonn-ext train` did not write,
    UserError for adapters whose lora.start does not exist, and InputError for the folder.
    """
    manifest = read_manifest(checkpoint)
    extra = manifest.extra
    try:
        config, origins = ModelConfig(**extra["model"]), Origins(**extra[ORIGINS])
        lora = LoraTable(**extra["config"]["lora"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint}: axonn-ext train did not write it: no model is described ({error})"
        ) from None
    stored = manifest.tensors.items()
    there = sum(math.prod(each.shape) for name, each in stored if name.startswith("model."))
    if config.num_parameters() > there:
        raise CheckpointError(
            f"{checkpoint}: extra describes a model of {config.num_parameters():,} parameters, but "
            f"the checkpoint has {there:,}"
        )
    try:
        origins = origins.found(like)
    except CheckpointError as error:
        if strict:
            raise CheckpointError(f"{checkpoint}: {error}") from None
        origins = Origins("", "")
    with process.process_group(Process(), HashStore()):
        parallel = ParallelConfig()
        model = models.build(config, axonn_ext.Grid(), parallel, seed=None, dtype=DTYPES[dtype])
        if lora.rank:
            add_adapters(model, lora, seed=0)
        load(checkpoint, model=model, random=False)
        if average:
            _load_averages(checkpoint, manifest, model)
        axonn_ext.merge_adapters(model)
        axonn_ext.save_pretrained(
            model, out, like=origins.pretrained or None, tokenizer=origins.tokenizer or None
        )
    return config


def _load_averages(checkpoint: Path, manifest: Manifest, model: nn.Module) -> None:
    """Sets the parameters to the averages that the checkpoint has of them."""
    shards = {
        f"optimizer.{name.removeprefix('model.')}.ema": shard
        for name, shard in model_shards(model, None).items()
    }
    kept = {name: shard for name, shard in shards.items() if name in manifest.tensors}
    read_shards(checkpoint, manifest, kept)
