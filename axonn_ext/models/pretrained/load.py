"""Loads a Hugging Face model onto a grid: each block is read by one of the ranks that hold it."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from axonn_ext.checkpoint.replicas import Replicas
from axonn_ext.checkpoint.state import model_shards
from axonn_ext.checkpoint.whole_tensors import names_of_stages
from axonn_ext.models.builder import build
from axonn_ext.models.pretrained.files import (
    CONFIG,
    WHOLE,
    PretrainedFiles,
    check_size,
    check_tensors,
    refuse_unknown,
)
from axonn_ext.models.pretrained.ranks import agree, compare_files
from axonn_ext.models.stored import Stored
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_json
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import read_config, text_model
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.stages import Stages

# Tensors that older versions of transformers wrote in addition to the parameters: masks and rotary
# frequencies, which follow from config.json.
_DERIVED = re.compile(r"(^|\.)(att(n|ention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


def from_pretrained(
    folder: str | Path,
    grid: Grid,
    parallel: ParallelConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    sequence_length: int | None = None,
    stages: Stages | None = None,
) -> Transformer:
    """Returns the model in a Hugging Face folder; this rank holds its blocks.

    folder: has config.json, and model.safetensors or several files with an index; if it has both,
    the single file is read, with a warning. Weights in FP8 (e4m3) with scales become the values
    that they stand for.
    dtype: of the parameters; default that of the largest tensor, but bf16 if that is FP8, and fp32
    on the CPU if that is fp16. sequence_length: the longest sequence of the model, if shorter than
    in config.json; only for rotary positions. stages: the blocks of each stage of the grid's
    pipeline; see Transformer.

    One of the ranks that hold a block maps the files and reads its slices. Collectives: an
    all-gather of whether a rank failed, and broadcasts of the blocks in the grid's groups. A digest
    of the files is compared through the c10d store.

    Raises:
        InputError (a ValueError): a file or tensor is missing, damaged or has another shape, or the
            architecture is not one of axonn_ext.models.
        ValueError: the grid does not divide the model.
        RuntimeError: ranks have different files or arguments, which it names.
    """
    folder = Path(folder)
    loaded: tuple[Transformer, Replicas, PretrainedFiles, set[str]] | None = None
    error: Exception | None = None
    try:
        config = _read_config(folder, sequence_length)
        loaded = _load(
            folder, config, grid, parallel, dtype=dtype, device=torch.device(device), stages=stages
        )
    except Exception as failure:
        error = failure
    agree(grid, error)
    assert loaded is not None
    model, replicas, files, names = loaded
    compare_files(
        grid, [folder / CONFIG, *files.paths], what="from_pretrained", dtype=dtype,
        sequence_length=sequence_length, parallel=parallel,
    )  # fmt: skip
    model.config_json = text_model(read_json(folder / CONFIG))
    if files.ignored and grid.rank == 0:
        text = f"{folder}: {WHOLE} is read, as transformers does; {files.ignored} is ignored"
        warnings.warn(text, stacklevel=2)
    if grid.rank == 0 and any(_is_of_images(name, model.config) for name in files.names):
        warnings.warn(f"{folder}: only the text model is loaded", stacklevel=2)
    refuse_unknown(files, names_of_stages(grid.axis("pipe"), names))
    replicas.spread()
    return model


def _read_config(folder: Path, sequence_length: int | None) -> ModelConfig:
    config = read_config(folder / CONFIG)
    if sequence_length is None:
        return config
    if not config.traits.rotary and sequence_length != config.sequence_length:
        raise InputError(
            f"sequence_length={sequence_length}: {config.family} has a table of "
            f"{config.sequence_length} positions"
        )
    longest, rope = config.sequence_length, config.rope_scaling
    if rope is not None and rope.rope_type == "dynamic":
        longest = int(longest * rope.factor)
    if sequence_length > longest:
        raise InputError(
            f"sequence_length={sequence_length}: the model takes at most {longest} tokens by "
            f"{folder / CONFIG}"
        )
    return dataclasses.replace(config, sequence_length=sequence_length)


def _load(
    folder: Path, config: ModelConfig, grid: Grid, parallel: ParallelConfig | None, *,
    dtype: torch.dtype | None, device: torch.device, stages: Stages | None,
) -> tuple[Transformer, Replicas, PretrainedFiles, set[str]]:  # fmt: skip
    """Returns this rank's stage of the model, the files, and the names in them that it knows.

    Blocks that several ranks hold are filled only on the rank that reads them for all.
    """
    files = PretrainedFiles(folder)
    check_size(files, config)
    unused = {n for n in files.names if _DERIVED.search(n) or _is_of_images(n, config)}
    unused |= files.names_of_scales
    stored_dtype = files.dtype(files.names - unused)
    if stored_dtype == torch.float16 and device.type == "cpu":
        stored_dtype = torch.float32  # CPUs multiply fp16 several times more slowly
    model = build(
        config, grid, parallel, stages=stages, seed=None, dtype=dtype or stored_dtype, device=device
    )
    names = _Names(files, model)
    blocks = [_Block(p, model.stored(p.name)) for p in sharded_parameters(model)]
    if names.has_tied_head and (model.has_embedding or model.has_head):
        [table] = [block for block in blocks if block.stored.names == (model.table_name,)]
        rows = table.p.spec.state_sizes[0]
        blocks.append(_Block(table.p, Stored(((model.head_name, rows),)), is_copy=True))
    expected = {
        names.of(name): shape
        for block in blocks
        for name, shape in block.stored.shapes(block.p.spec.state_sizes).items()
    }
    check_tensors(files, expected)
    replicas = Replicas(model, model_shards(model, None))
    with torch.no_grad():
        for block in blocks:
            block.p.parameter[block.p.own_rows() :].zero_()  # padding
            if f"model.{block.p.name}" in replicas.own:
                block.fill(files, names)
    return model, replicas, files, {*expected, *unused}


def _is_of_images(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor belongs to the part of a model that reads images."""
    whole = config.traits.hugging_face.multimodal
    return whole is not None and name.removeprefix("model.").startswith(whole.others)


class _Names:
    """The names of the tensors in the files, which may have only the body, or more than the model.

    has_tied_head: whether the files also have the head, though the model ties it to its table.
    """

    def __init__(self, files: PretrainedFiles, model: Transformer) -> None:
        theirs = model.config.traits.hugging_face
        self._body = f"{theirs.names.body.partition('.')[0]}."
        bodies = (*(theirs.multimodal.bodies if theirs.multimodal else ()), self._body, "")
        # What names in the files begin with instead.
        self._found = next(b for b in bodies if any(name.startswith(b) for name in files.names))
        self.has_tied_head = model.config.tie_embeddings and model.head_name in files.names

    def of(self, name: str) -> str:
        if not name.startswith(self._body):
            return name
        return self._found + name.removeprefix(self._body)


class _Block(NamedTuple):
    """This rank's block of a parameter, and its place in the files.

    is_copy: the place is a second copy in the files.
    """

    p: ShardedParameter
    stored: Stored
    is_copy: bool = False

    def fill(self, files: PretrainedFiles, names: _Names) -> None:
        """Fills the block from the files. Raises InputError if a copy differs from it."""
        p = self.p
        offsets, sizes = p.grid.local_block(p.spec.full_sizes, p.spec.dims)
        sizes[0] = p.own_rows()
        own = p.parameter[: sizes[0]]
        if not sizes[0]:
            return

        def read_rows(name: str, rows: range, columns: range | None) -> Tensor:
            return files.read(names.of(name), rows, columns)

        found = self.stored.read(offsets, sizes, read_rows).to(own)
        if not self.is_copy:
            own.copy_(found)
        elif not torch.equal(found, own):
            raise InputError(
                f"{files.folder}: {self.stored.names[0]} differs from the embedding, to which "
                f"{CONFIG} ties it (tie_word_embeddings)"
            )
