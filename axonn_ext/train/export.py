"""Writes the model of a checkpoint as transformers loads it."""

from __future__ import annotations

import math
from pathlib import Path

from torch.distributed import HashStore

import axonn_ext
from axonn_ext import models
from axonn_ext.checkpoint import CheckpointError, load
from axonn_ext.checkpoint.manifest import read_manifest
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.pretrained import merge_adapters, save_pretrained
from axonn_ext.train.checkpoints import CONFIG_JSON
from axonn_ext.train.config import LoraTable
from axonn_ext.train.job import DTYPES
from axonn_ext.train.model import add_adapters


def export(checkpoint: Path, out: Path, *, dtype: str) -> ModelConfig:
    """Writes the model to a new folder as `save_pretrained` does; returns its description.

    The whole model is in memory, in the given dtype, with the updates of its adapters, if it has
    any. Raises CheckpointError for a checkpoint that is damaged or that `axonn-ext train` did not
    write, UserError for adapters whose lora.start is not there, and InputError for the folder.
    """
    manifest = read_manifest(checkpoint)
    extra = manifest.extra
    try:
        config = ModelConfig(**extra["model"])
        lora = LoraTable(**extra["config"]["lora"])
    except (KeyError, TypeError, ValueError) as error:
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
    with process.process_group(Process(), HashStore()):
        parallel = ParallelConfig()
        model = models.build(config, axonn_ext.Grid(), parallel, seed=None, dtype=DTYPES[dtype])
        model.config_json = extra.get(CONFIG_JSON, {})
        if lora.rank:
            add_adapters(model, lora, seed=0)
        load(checkpoint, model=model, random=False)
        merge_adapters(model)
        save_pretrained(model, out)
    return config
