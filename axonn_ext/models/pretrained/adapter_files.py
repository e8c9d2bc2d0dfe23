"""Reads and writes low-rank adapters in PEFT's format: adapter_config.json and one safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from axonn_ext.checkpoint.files import remove, sync_folder, write_tensors, write_text
from axonn_ext.models.pretrained.files import check_dtype
from axonn_ext.models.pretrained.lora import (
    ALL_LINEAR,
    adapters_of,
    add_adapters,
    remove_adapters,
    target_names,
)
from axonn_ext.models.pretrained.ranks import agree, compare_files
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import Adapter
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.spec.files.errors import InputError, first_of
from axonn_ext.spec.files.files import is_file, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's prefix of the model's own module names
# Unsupported options that change an adapter's result, with the values that change nothing. (Other
# kinds of initial values also change the model's weights.)
_NOT_DONE: dict[str, Any] = {
    "init_lora_weights": (True, False, "gaussian"),
    "bias": "none", "use_dora": False, "use_rslora": False, "use_qalora": False,
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
    "layer_replication": None, "target_parameters": None, "trainable_token_indices": None,
    "lora_bias": False, "exclude_modules": None, "alora_invocation_tokens": None,
}  # fmt: skip


def save_adapter(model: Transformer, folder: str | Path, *, base: str = "") -> None:
    """Writes the model's adapters to a new folder, in PEFT's format.

    All ranks call it; rank 0 writes. base: the name or folder of the base model.
    Collectives: all-gathers over the axes that split each parameter, and one of errors.

    Raises InputError (a ValueError) on every rank if the folder exists or cannot be written, or if
    the model has no adapters.
    """
    error: Exception | None = None
    tensors: dict[str, Tensor] = {}
    for p in _parameters(model):
        whole = p.grid.unshard(p.parameter, p.spec.dims)
        if model.grid.rank == 0:
            named = model.stored(p.name).export(whole)
            tensors |= {_PREFIX + name: tensor.cpu() for name, tensor in named.items()}
    if model.grid.rank == 0:
        try:
            _write(model, Path(folder).absolute(), tensors, base)
        except (OSError, ValueError) as failure:
            error = InputError(f"save_adapter: {failure}")
    agree(model.grid, error)


def load_adapter(model: Transformer, folder: str | Path) -> None:
    """Adds the adapters of a folder written by PEFT or `save_adapter`; freezes everything else.

    Each rank reads its blocks. Collectives: an all-gather of whether a rank failed. A digest of the
    files is compared through the c10d store.

    Raises InputError (a ValueError) if a file or tensor is missing, damaged or has another shape,
    if the kind of adapters is not supported, or if the model already has adapters; the model is
    then unchanged. RuntimeError: ranks have different files.
    """
    had_adapters = bool(adapters_of(model))
    trained = [p.requires_grad for p in model.parameters()]
    error: Exception | None = None
    try:
        _load(model, Path(folder))
    except Exception as failure:
        error = failure
    try:
        agree(model.grid, error)
    except Exception:
        if not had_adapters:
            remove_adapters(model)
            for parameter, was_trained in zip(model.parameters(), trained, strict=True):
                parameter.requires_grad_(was_trained)
        raise
    files = [Path(folder) / name for name in (ADAPTER_CONFIG, ADAPTER_TENSORS)]
    compare_files(model.grid, files, what="load_adapter")


def _parameters(model: Transformer) -> list[ShardedParameter]:
    """Returns the parameters of all adapters."""
    return [
        p
        for p in sharded_parameters(model)
        if isinstance(model.get_submodule(p.name.rpartition(".")[0]), Adapter)
    ]


def _write(model: Transformer, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
    adapters = [adapter for _, adapter in adapters_of(model)]
    if not adapters:
        raise InputError("the model has no adapters")
    if folder.exists():
        raise InputError(f"{folder}: expected a new folder, got one that exists")
    full = [target.name for adapter in adapters for target in adapter.targets]
    short = sorted({name.rpartition(".")[2] for name in full})
    alike = [name for name in target_names(model) if name.rpartition(".")[2] in short]
    transposed = any(
        model.stored(f"{name}.weight").transposed
        for name, module in model.named_modules()
        if getattr(module, "adapter", None) is not None
    )
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": adapters[0].rank, "lora_alpha": adapters[0].alpha, "lora_dropout": 0.0,
        "target_modules": short if set(alike) == set(full) else full,
        "fan_in_fan_out": transposed, "bias": "none", "inference_mode": True,
    }  # fmt: skip
    partial = folder.with_name(f".{folder.name}.partial")
    remove(partial)
    partial.mkdir(parents=True)
    try:
        write_tensors(partial / ADAPTER_TENSORS, dict(tensors), {"format": "pt"})
        write_text(partial / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
        sync_folder(partial)
        partial.rename(folder)
    except BaseException:
        remove(partial)
        raise
    sync_folder(folder.parent)


def _load(model: Transformer, folder: Path) -> None:
    config = _read_config(folder / ADAPTER_CONFIG)
    path = folder / ADAPTER_TENSORS
    if not is_file(path):
        raise InputError(f"{path}: is missing")
    targets = config["target_modules"]
    try:
        names = [targets] if targets == ALL_LINEAR else targets
        if isinstance(names, str):  # a regular expression
            names = [name for name in target_names(model) if re.fullmatch(targets, name)]
        add_adapters(model, rank=config["r"], alpha=config["lora_alpha"], targets=names)
    except (ValueError, re.error) as error:
        raise InputError(f"{folder / ADAPTER_CONFIG}: {error}") from None
    try:
        with safe_open(path, framework="pt") as file:
            _fill(model, path, file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: is not a whole safetensors file: {error}") from None


@torch.no_grad()
def _fill(model: Transformer, path: Path, file: safe_open) -> None:
    """Fills the adapters from the file, which must have exactly their tensors."""
    parameters = [(p, model.stored(p.name)) for p in _parameters(model)]
    expected = {
        _PREFIX + name: shape
        for p, stored in parameters
        for name, shape in stored.shapes(p.spec.full_sizes).items()
    }
    there = set(file.keys())
    for which, names in (("missing", expected.keys() - there), ("unknown", there - set(expected))):
        if names:
            raise InputError(f"{path}: tensors are {which}: {first_of(sorted(names))}")
    for name, shape in expected.items():
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise InputError(f"{path}: {name} must have shape {list(shape)}, got {list(found)}")
        check_dtype(path, name, file.get_slice(name))

    def read_rows(name: str, rows: range, columns: range | None) -> Tensor:
        assert columns is not None
        found = file.get_slice(_PREFIX + name)
        return found[rows.start : rows.stop, columns.start : columns.stop]

    for p, stored in parameters:
        offsets, sizes = p.grid.local_block(p.spec.full_sizes, p.spec.dims)
        p.parameter.copy_(stored.read(offsets, sizes, read_rows))


def _read_config(path: Path) -> Mapping[str, Any]:
    """Returns adapter_config.json. Raises InputError for unsupported options."""
    config = read_json(path)
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        raise InputError(f"{path}: expected peft_type LORA")
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    texts = [targets] if isinstance(targets, str) else targets
    if type(rank) is not int or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InputError(f"{path}: expected numbers r and lora_alpha, got {rank} and {alpha}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: expected names as target_modules, got {targets}")
    for key, supported in _NOT_DONE.items():
        known = supported if isinstance(supported, tuple) else (supported,)
        value = config.get(key)
        if value not in (*known, None, False, [], {}):
            raise InputError(f"{path}: {key} must be {known[0]}, got {value}")
    return config
