"""Writes the model of a checkpoint as transformers loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch.distributed import HashStore

import axonn_ext
from axonn_ext import models
from axonn_ext.checkpoint import CheckpointError, load
from axonn_ext.checkpoint.files import write_tensors, write_text
from axonn_ext.checkpoint.manifest import read_manifest
from axonn_ext.launch import process
from axonn_ext.launch.place import Process
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.train.job import DTYPES


def export(checkpoint: Path, out: Path, *, dtype: str) -> ModelConfig:
    """Writes model.safetensors and config.json to a new folder; returns the model's description.

    The whole model is in memory, in the given dtype. Raises CheckpointError for a checkpoint that
    is damaged or that `axonn-ext train` did not write, and OSError.
    """
    extra = read_manifest(checkpoint).extra
    try:
        config = ModelConfig(**extra["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint}: axonn-ext train did not write it: no model is described ({error})"
        ) from None
    with process.process_group(Process(), HashStore()):
        parallel = ParallelConfig()
        model = models.build(config, axonn_ext.Grid(), parallel, seed=0, dtype=DTYPES[dtype])
        load(checkpoint, model=model, random=False)
        state = axonn_ext.full_state_dict(model)
    if config.tie_embeddings:
        state.pop("lm_head.weight")  # the same tensor as the table
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    described = config.traits.hugging_face.config_json(config)
    names = {"fp32": "float32", "bf16": "bfloat16"}
    described |= {"torch_dtype": names[dtype]}
    partial = out.with_name(f".{out.name}.partial")
    partial.mkdir(parents=True)
    try:
        write_tensors(partial / "model.safetensors", state, {"format": "pt"})
        write_text(partial / "config.json", json.dumps(described, indent=2) + "\n")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return config
