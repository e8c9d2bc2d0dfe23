"""The files of a Hugging Face model: one of safetensors, or several with an index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from axonn_ext.inputs.errors import InputError, first_of
from axonn_ext.inputs.files import is_file, read_json

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PretrainedFiles:
    """The tensors of a model's folder, of which slices can be read.

    The files are mapped into memory, so that reading a slice takes memory for this slice alone.
    Raises InputError, which names the file, where one is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        if is_file(folder / INDEX):
            self._file_of = _read_index(folder / INDEX)
        elif is_file(folder / WHOLE):
            self._file_of = dict.fromkeys(self._file(WHOLE).keys(), WHOLE)
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
        """Returns these rows and, of a matrix, these columns of them."""
        stored = self._slice(name)
        if columns is None:
            found = stored[rows.start : rows.stop]
        else:
            found = stored[rows.start : rows.stop, columns.start : columns.stop]
        assert isinstance(found, Tensor)
        return found

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Returns the dtype of the largest of these tensors. Raises InputError for other dtypes."""
        largest = max(sorted(names), key=lambda name: math.prod(self.shape(name)))
        dtype = self.read(largest, range(0), None).dtype
        if dtype not in _DTYPES:
            known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
            raise InputError(
                f"{self.folder}: {largest} must be one of {known}, got "
                f"{str(dtype).removeprefix('torch.')}"
            )
        return dtype

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


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(names, Mapping) or not all(_is_plain(file) for file in names.values()):
        raise InputError(f"{path}: expected a weight_map from tensors to files of this folder")
    return dict(names)


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


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
    """Raises InputError for tensors that the model has no use for."""
    unknown = sorted(files.names - set(known))
    if unknown:
        raise InputError(
            f"{files.folder}: tensors that the model does not have: {first_of(unknown)}"
        )


def stop_ids(folder: Path) -> list[int]:
    """Returns the ids that end a text (eos_token_id); none if the files name none.

    Raises InputError for a file that cannot be read.
    """
    for name in ("generation_config.json", CONFIG):
        described = read_json(folder / name) if is_file(folder / name) else {}
        value = described.get("eos_token_id") if isinstance(described, Mapping) else None
        ids: list[Any] = value if isinstance(value, list) else [value]
        found = [each for each in ids if type(each) is int and each >= 0]
        if found:
            return found
    return []
