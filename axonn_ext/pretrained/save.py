"""Writes a model as transformers loads it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from axonn_ext.checkpoint.files import write_tensors, write_text
from axonn_ext.inputs.errors import InputError
from axonn_ext.inputs.files import is_file, read_json
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.pretrained.files import CONFIG, INDEX, WHOLE

SHARD_BYTES = 5_000_000_000  # as many as transformers writes into one file
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def save_pretrained(
    model: Transformer,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the model to a new folder, from which transformers and `from_pretrained` load it.

    All ranks call it. like: a folder whose tokenizer's files are copied, and whose config.json
    gives the keys that say nothing about the model's shape, such as the ids of special tokens.
    shard_bytes: the most bytes of tensors in one file, unless a tensor alone has more.

    Rank 0 writes; it holds the tensors of one file in memory, each other rank one tensor. The
    folder is written beside and then renamed. Collectives: all-gathers over the axes that split
    each parameter, and one of whether rank 0 failed.

    Raises InputError (a ValueError) on every rank if the folder exists or cannot be written.
    """
    writer = _Writer(Path(folder), _plan(model, shard_bytes)) if model.grid.rank == 0 else None
    for p in sharded_parameters(model):
        whole = p.grid.unshard(p.parameter, p.spec.dims)
        if writer is not None:
            writer.take(model.stored(p.name).export(whole))
    errors: list[str | None] = [None]
    if writer is not None:
        writer.finish(model, None if like is None else Path(like))
        errors = [writer.error]
    if model.grid.world_size > 1:
        dist.broadcast_object_list(errors, src=0)
    if errors[0] is not None:
        raise InputError(f"save_pretrained: {errors[0]}")


def _plan(model: Transformer, shard_bytes: int) -> list[list[str]]:
    """Returns the names of the tensors of each file, in the order of the model's parameters."""
    files: list[list[str]] = []
    room = 0
    for p in sharded_parameters(model):
        for name, shape in model.stored(p.name).shapes(p.spec.full_sizes).items():
            size = math.prod(shape) * p.parameter.element_size()
            if not files or size > room:
                files.append([])
                room = shard_bytes
            files[-1].append(name)
            room -= size
    return files


class _Writer:
    """Writes the files of a model, as soon as all tensors of one are there.

    error: what went wrong; the tensors that come afterwards are dropped.
    """

    error: str | None = None

    def __init__(self, folder: Path, plan: list[list[str]]) -> None:
        self._folder, self._plan = folder, plan
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._held: dict[str, Tensor] = {}
        self._bytes = self._num_files = 0
        with self._caught():
            if folder.exists():
                raise InputError(f"{folder}: expected a new folder, got one that exists")
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes whole tensors, and writes a file if it is complete."""
        if self.error is not None:
            return
        self._held |= {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        names = self._plan[self._num_files] if self._num_files < len(self._plan) else []
        if names and all(name in self._held for name in names):
            with self._caught():
                self._write({name: self._held.pop(name) for name in names})

    def finish(self, model: Transformer, like: Path | None) -> None:
        """Writes what is not tensors, and gives the folder its name."""
        if self.error is not None:
            return
        with self._caught():
            if len(self._plan) > 1:
                index = {
                    "metadata": {"total_size": self._bytes},
                    "weight_map": {
                        name: self._name(number)
                        for number, names in enumerate(self._plan)
                        for name in names
                    },
                }
                write_text(self._partial / INDEX, json.dumps(index, indent=2) + "\n")
            write_text(self._partial / CONFIG, json.dumps(_describe(model, like), indent=2) + "\n")
            for name in _TOKENIZER:
                if like is not None and is_file(like / name):
                    shutil.copyfile(like / name, self._partial / name)
            self._partial.rename(self._folder)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_tensors(self._partial / self._name(self._num_files), tensors, {"format": "pt"})
        self._num_files += 1
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _name(self, number: int) -> str:
        if len(self._plan) == 1:
            return WHOLE
        return f"model-{number + 1:05d}-of-{len(self._plan):05d}.safetensors"

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.error = str(error)
            shutil.rmtree(self._partial, ignore_errors=True)


def _describe(model: Transformer, like: Path | None) -> dict[str, Any]:
    """Returns what config.json says. Keys of `like` that ours does not have are kept."""
    kept = {} if like is None else dict(read_json(like / CONFIG))
    described = model.config.traits.hugging_face.config_json(model.config)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return kept | described | {"torch_dtype": dtype}
