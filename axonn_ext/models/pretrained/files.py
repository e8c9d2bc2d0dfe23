"""The files of a Hugging Face model: one safetensors file, or several with an index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from axonn_ext.models.pretrained.float8 import FP8, Scales
from axonn_ext.spec.files.errors import InputError, first_of
from axonn_ext.spec.files.files import is_file, read_json
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import read_config

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_MOST_TIMES = 2  # a model with more than this many times the files' parameters is refused at once


class PretrainedFiles:
    """The tensors of a model's folder; slices of them can be read.

    The files are mapped into memory, so that reading a slice takes memory only for this slice. As
    in transformers, a single file takes precedence over several with an index. ignored: the index
    in this case. Weights in FP8 are read as values in fp32. Raises InputError, which names the
    file, if one is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self.ignored = ""
        if is_file(folder / WHOLE):
            self._file_of = dict.fromkeys(self._file(WHOLE).keys(), WHOLE)
            self.ignored = INDEX if is_file(folder / INDEX) else ""
        elif is_file(folder / INDEX):
            self._file_of = _read_index(folder / INDEX)
        else:
            pickled = any(folder.glob("pytorch_model*.bin"))
            raise InputError(
                f"{folder}: expected {WHOLE}, or {INDEX} and the files that it names"
                + (
                    "; got pickled weights, which can run code: load them with transformers once, "
                    "and save them again"
                    if pickled
                    else ""
                )
            )
        for name in sorted(set(self._file_of.values())):
            self._file(name)
        if not self._file_of:
            raise InputError(f"{folder / WHOLE}: expected tensors, got none")
        self._scales = Scales(self._file_of, self._is_fp8, folder / CONFIG)

    @property
    def names_of_scales(self) -> frozenset[str]:
        """The names of the tensors that only describe others in FP8."""
        return self._scales.names

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._file_of)

    @property
    def paths(self) -> list[Path]:
        """The files that have the tensors."""
        return [self.folder / name for name in sorted(self._open)]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, rows: range, columns: range | None) -> Tensor:
        """Returns these rows and, for a matrix, only these columns."""
        stored = self._slice(name)
        if columns is None:
            found = stored[rows.start : rows.stop]
        else:
            found = stored[rows.start : rows.stop, columns.start : columns.stop]
        assert isinstance(found, Tensor)
        if not self._is_fp8(name):
            return found
        own = self._scales.of(name)
        assert own is not None, "`dtype` refuses it"
        whole = self._file(self._file_of[own]).get_tensor(own)
        try:
            factors = self._scales.of_elements(whole, self.shape(name), rows, columns)
        except ValueError as error:
            raise InputError(
                f"{self.folder / self._file_of[own]}: {own}: expected {error}"
            ) from None
        return found.float() * factors

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Returns the dtype of the largest of these tensors, or bf16 if it is in FP8.

        Raises InputError if one of them has a dtype that does not store plain values.
        """
        for name in sorted(names):
            if not self._scales.of(name):
                check_dtype(self.folder / self._file_of[name], name, self._slice(name))
        largest = max(sorted(names), key=lambda name: math.prod(self.shape(name)))
        return _DTYPES.get(self._slice(largest).get_dtype(), torch.bfloat16)

    def _is_fp8(self, name: str) -> bool:
        return bool(self._slice(name).get_dtype() == FP8)

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._file(file).get_slice(name)
        except SafetensorError as error:
            raise InputError(
                f"{self.folder / file}: {INDEX} says that it has {name}: {error}"
            ) from None

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self.folder / name
            if not is_file(path):
                raise InputError(f"{path}: is missing, but {INDEX} names it")
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: is not a whole safetensors file: {error}") from None
        return self._open[name]


def check_dtype(path: Path, name: str, stored: Any) -> None:
    """Raises InputError for a safetensors slice whose dtype does not store plain values."""
    if (dtype := stored.get_dtype()) not in _DTYPES:
        raise InputError(
            f"{path}: {name} must be one of {', '.join(_DTYPES)}, got {dtype}; have transformers "
            "dequantize a quantized model once, and save it again"
        )


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(names, Mapping) or not all(_is_plain(file) for file in names.values()):
        raise InputError(f"{path}: expected a weight_map from tensors to files of this folder")
    if not names:
        raise InputError(f"{path}: expected a weight_map with tensors, got an empty one")
    return dict(names)


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


def read_model(folder: Path) -> ModelConfig:
    """Returns the model config in config.json, if it can match the folder's files.

    Raises InputError if files are missing, or have far fewer parameters (`check_size`).
    """
    config = read_config(folder / CONFIG)
    check_size(PretrainedFiles(folder), config)
    return config


def check_size(files: PretrainedFiles, config: ModelConfig) -> None:
    """Raises InputError for a model far larger than its files, before it takes any memory.

    A slightly larger model can be built, and `check_tensors` names the tensors that differ.
    """
    there = sum(math.prod(files.shape(name)) for name in files.names)
    if config.num_parameters() <= _MOST_TIMES * there:
        return
    keys = config.traits.hugging_face.keys
    sizes = ("num_layers", "hidden_size", "vocab_size")
    raise InputError(
        f"{files.folder / CONFIG}: describes a model of {config.num_parameters():,} parameters "
        f"({', '.join(f'{keys[size]}={getattr(config, size)}' for size in sizes)}), but the files "
        f"have {there:,}"
    )


def check_tensors(files: PretrainedFiles, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InputError if a tensor is missing or has another shape."""
    missing = sorted(expected.keys() - files.names)
    if missing:
        raise InputError(f"{files.folder}: tensors are missing: {first_of(missing)}")
    for name, shape in expected.items():
        if files.shape(name) != shape:
            raise InputError(
                f"{files.folder}: {name} must have shape {list(shape)} by {CONFIG}, got "
                f"{list(files.shape(name))}"
            )


def refuse_unknown(files: PretrainedFiles, known: Iterable[str]) -> None:
    """Raises InputError for tensors that the model does not use."""
    unknown = sorted(files.names - set(known))
    if unknown:
        raise InputError(
            f"{files.folder}: tensors that the model does not have: {first_of(unknown)}"
        )
