"""Writes a model in transformers' format."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.checkpoint.files import remove, sync_folder, write_tensors, write_text
from axonn_ext.models.pretrained.files import CONFIG, INDEX, WHOLE
from axonn_ext.models.pretrained.lora import adapters_of
from axonn_ext.models.pretrained.tokenizer import copy_tokenizer, special_ids
from axonn_ext.models.stored import Stored
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.ranks.rank_values import dtype_named, of_all_ranks, of_first_rank
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_json
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import read_config, text_model

SHARD_BYTES = 5_000_000_000  # bytes per file, as in transformers
# Further keys of another config.json that would contradict ours.
_DECIDED = (
    "architectures", "dtype", "torch_dtype", "rope_parameters", "rope_scaling", "layer_types",
    "quantization_config", "attention_bias", "mlp_bias",
)  # fmt: skip


def save_pretrained(
    model: Transformer,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the model to a new folder that transformers and `from_pretrained` can load.

    All ranks call it. Properties that the model does not represent, such as the ids of special
    tokens or a sliding window, are kept from the config.json that the model was loaded from.

    like         a folder whose tokenizer and generation_config.json are copied, and whose
                 config.json is used instead
    tokenizer    a file of the tokenizers library that is copied, with the files next to it, instead
                 of the tokenizer of `like`; or "bytes": no tokenizer is copied
    shard_bytes  maximum bytes of tensors per file, unless a single tensor is larger

    Rank 0 writes; it holds the tensors of one file in memory, each other rank one tensor. The
    folder is written under a temporary name and then renamed. Collectives: all-gathers over the
    axes that split each parameter, and a broadcast of whether rank 0 failed.

    Raises InputError (a ValueError) on every rank if the folder exists or cannot be written, or if
    the model has adapters, which need a separate folder (`save_adapter`) or must be merged.
    """
    if adapters_of(model):
        raise InputError("save_pretrained: the model has adapters; use save_adapter, or merge them")
    every = _parameters_of_all_stages(model)
    writer = _Writer(folder, model, every, shard_bytes) if model.grid.rank == 0 else None
    for described, whole in _whole_tensors(model, every):
        if writer is not None:
            writer.take(described, whole)
    error: str | None = None
    if writer is not None:
        writer.finish(None if like is None else Path(like), tokenizer)
        error = writer.error
    if model.grid.world_size > 1:
        error = of_first_rank(error)
    if error is not None:
        raise InputError(f"save_pretrained: {error}")


@dataclass(frozen=True)
class _Parameter:
    """A parameter, the first stage that has it, and how transformers stores it."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    stored: Stored

    def values(self) -> list[Any]:
        """Returns JSON values that `of` reads."""
        where, order = self.stored, self.stored.order
        rows = None if order is None else order.tolist()
        return [
            self.name, self.sizes, str(self.dtype), self.stage, where.parts, rows, where.transposed
        ]  # fmt: skip

    @classmethod
    def of(cls, values: list[Any]) -> _Parameter:
        name, sizes, dtype, stage, parts, rows, transposed = values
        order = None if rows is None else torch.tensor(rows)
        stored = Stored(tuple((part, size) for part, size in parts), order, transposed)
        return cls(name, tuple(sizes), dtype_named(dtype), stage, stored)


def _parameters_of_all_stages(model: Transformer) -> list[_Parameter]:
    """Returns the parameters of all stages, each once, in the order of stages.

    Collectives: with several stages, an all-gather of the descriptions.
    """
    stages = model.grid.axis("pipe")
    own = [
        _Parameter(p.name, p.spec.state_sizes, p.parameter.dtype, stages.rank, model.stored(p.name))
        for p in sharded_parameters(model)
    ]
    if stages.size == 1:
        return own
    every: dict[str, _Parameter] = {}
    for of_stage in of_all_ranks([p.values() for p in own], stages.process_group):
        for parameter in map(_Parameter.of, of_stage):
            every.setdefault(parameter.name, parameter)
    return list(every.values())


def _whole_tensors(
    model: Transformer, every: Sequence[_Parameter]
) -> Iterator[tuple[_Parameter, Tensor]]:
    """Yields each whole parameter; rank 0 receives it from the stage that has it."""
    grid, stages = model.grid, model.grid.axis("pipe")
    with_rank_0 = all(grid.coords[axis] == 0 for axis in ("data", "z", "y", "x"))
    own = {p.name: p for p in sharded_parameters(model)}
    for described in every:
        whole = torch.empty(0)
        if described.stage == stages.rank:
            p = own[described.name]
            whole = p.whole(p.parameter)
        if described.stage > 0 and grid.rank == 0:
            device = next(model.parameters()).device
            whole = torch.empty(described.sizes, dtype=described.dtype, device=device)
            dist.recv(whole, group=stages.process_group, group_src=described.stage)
        elif with_rank_0 and 0 < described.stage == stages.rank:
            dist.send(whole.contiguous(), group=stages.process_group, group_dst=0)
        yield described, whole


def _plan(every: Sequence[_Parameter], shard_bytes: int) -> list[list[str]]:
    """Returns the names of the tensors of each file, in the order of the model's parameters."""
    files: list[list[str]] = []
    room = 0
    for p in every:
        for name, shape in p.stored.shapes(p.sizes).items():
            size = math.prod(shape) * p.dtype.itemsize
            if not files or size > room:
                files.append([])
                room = shard_bytes
            files[-1].append(name)
            room -= size
    return files


class _Writer:
    """Writes the files of a model, each as soon as all its tensors are there.

    error: the first error; later tensors are dropped.
    """

    error: str | None = None

    def __init__(
        self, folder: str | Path, model: Transformer, every: Sequence[_Parameter], shard_bytes: int
    ) -> None:
        self._model = model
        self._held: dict[str, Tensor] = {}
        self._bytes = self._num_files = 0
        self._partial: Path | None = None
        with self._caught():
            self._folder = Path(folder).absolute()
            if self._folder.exists():
                raise InputError(f"{folder}: expected a new folder, got one that exists")
            self._plan = _plan(every, shard_bytes)
            self._partial = self._folder.with_name(f".{self._folder.name}.partial")
            remove(self._partial)
            self._partial.mkdir(parents=True)

    def take(self, parameter: _Parameter, whole: Tensor) -> None:
        """Takes a whole parameter, and writes the files that it completes."""
        if self.error is not None:
            return
        with self._caught():
            tensors = parameter.stored.export(whole)
            self._held |= {name: tensor.detach().cpu() for name, tensor in tensors.items()}
            while self._num_files < len(self._plan) and self._held.keys() >= set(
                names := self._plan[self._num_files]
            ):
                self._write({name: self._held.pop(name).contiguous() for name in names})

    def finish(self, like: Path | None, tokenizer: str | Path | None) -> None:
        """Writes all other files, and gives the folder its final name."""
        if self.error is not None:
            return
        with self._caught():
            assert self._partial is not None
            assert not self._held and self._num_files == len(self._plan)
            if len(self._plan) > 1:
                write_text(self._partial / INDEX, _as_json(self._index()))
            copy_tokenizer(self._partial, like=like, tokenizer=tokenizer)
            described = _describe(self._model, like)
            described |= special_ids(self._partial, described, like=like)
            write_text(self._partial / CONFIG, _as_json(described))
            found, config = read_config(self._partial / CONFIG), self._model.config
            describe = config.traits.hugging_face.config_json
            length = (config if config.traits.rotary else found).sequence_length
            if describe(dataclasses.replace(found, sequence_length=length)) != describe(config):
                source = f"of {like}" if like is not None else "that it was loaded from"
                raise InputError(f"the {CONFIG} {source} contradicts the model")
            sync_folder(self._partial)
            self._partial.rename(self._folder)
            sync_folder(self._folder.parent)

    def _index(self) -> dict[str, Any]:
        files = {
            name: self._name(number) for number, names in enumerate(self._plan) for name in names
        }
        return {"metadata": {"total_size": self._bytes}, "weight_map": files}

    def _write(self, tensors: dict[str, Tensor]) -> None:
        assert self._partial is not None
        write_tensors(self._partial / self._name(self._num_files), tensors, {"format": "pt"})
        self._num_files += 1
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _name(self, number: int) -> str:
        if len(self._plan) == 1:
            return WHOLE
        return f"model-{number + 1:05d}-of-{len(self._plan):05d}.safetensors"

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Keeps any error for all ranks, and removes the unfinished folder."""
        try:
            yield
        except BaseException as error:
            if self._partial is not None:
                remove(self._partial)
            if not isinstance(error, Exception):
                raise
            self.error = str(error) or type(error).__name__


def _describe(model: Transformer, like: Path | None) -> dict[str, Any]:
    """Returns the new config.json, which keeps the keys of the model's or `like`'s that ours does
    not decide."""
    kept = model.config_json if like is None else text_model(read_json(like / CONFIG))
    if not isinstance(kept, Mapping):
        raise InputError(f"{like}/{CONFIG}: expected a table")
    theirs = model.config.traits.hugging_face
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    ours = theirs.config_json(model.config) | {"architectures": [theirs.architecture]}
    if kept.get("model_type") == theirs.model_type:
        _keep_alike(ours, kept, model.config)
    kept = {key: value for key, value in kept.items() if key not in _DECIDED}
    # transformers 5 reads dtype, earlier versions torch_dtype.
    return kept | ours | {"dtype": dtype, "torch_dtype": dtype}


def _keep_alike(ours: dict[str, Any], kept: Mapping[str, Any], config: ModelConfig) -> None:
    """Keeps values in `kept` that differ from ours but describe the same model."""
    theirs = config.traits.hugging_face
    # A model with rotary positions may have been loaded for shorter sequences than it supports.
    longest, key = kept.get(theirs.keys["sequence_length"]), theirs.keys["sequence_length"]
    if config.traits.rotary and type(longest) is int and longest > ours[key]:
        ours[key] = longest
    window = theirs.window_key
    if window in ours and window not in kept and ours[window] == theirs.defaults[window]:
        del ours[window]
    if kept.get(theirs.activation_key) in theirs.activations:
        del ours[theirs.activation_key]
    if isinstance(kinds := kept.get("layer_types"), list) and len(kinds) == config.num_layers:
        ours["layer_types"] = kinds


def _as_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
