"""Loads a Hugging Face model onto a grid: each rank reads its blocks alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.grid import Grid
from axonn_ext.inputs.errors import InputError
from axonn_ext.models.builder import build
from axonn_ext.models.stored import Stored
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.planner.model_files import load_model
from axonn_ext.pretrained.files import PretrainedFiles, check_tensors, refuse_unknown
from axonn_ext.spec.parallel import ParallelConfig

# What older versions of transformers wrote beside the parameters: masks, and frequencies of
# rotary positions, which follow from config.json.
_DERIVED = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


def from_pretrained(
    folder: str | Path,
    grid: Grid,
    parallel: ParallelConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    sequence_length: int | None = None,
) -> Transformer:
    """Returns the model of a Hugging Face folder, of which this rank holds its blocks.

    folder: has config.json, and model.safetensors or several files with an index.
    dtype: of the parameters; default that of the files. sequence_length: the longest sequence that
    the model can take, if that is less than config.json says; only where positions are rotary.

    Each rank maps the files and reads the slices that it needs. Collectives: an all-gather of
    whether a rank failed.

    Raises:
        InputError (a ValueError): a file or tensor is missing, damaged or of another shape, or the
            architecture is not one of axonn_ext.models.
        ValueError: the grid does not divide the model.
    """
    model, error = None, None
    try:
        model = _load(Path(folder), grid, parallel, dtype, torch.device(device), sequence_length)
    except ValueError as failure:
        error = failure
    _agree(grid, error)
    assert model is not None
    return model


def _load(
    folder: Path, grid: Grid, parallel: ParallelConfig | None, dtype: torch.dtype | None,
    device: torch.device, sequence_length: int | None,
) -> Transformer:  # fmt: skip
    _, config = load_model(str(folder))
    if sequence_length is not None:
        if not config.traits.rotary and sequence_length != config.sequence_length:
            raise InputError(
                f"sequence_length={sequence_length}: {config.family} has a table of "
                f"{config.sequence_length} positions"
            )
        _, config = load_model(str(folder), sequence_length=sequence_length)
    files = PretrainedFiles(folder)
    if dtype is None:
        dtype = files.dtype()
    model = build(config, grid, parallel, seed=None, dtype=dtype)
    names = _Names(files, model)
    blocks = [_Block(p, model.stored(p.name)) for p in sharded_parameters(model)]
    expected = {
        names.of(name): shape
        for block in blocks
        for name, shape in block.stored.shapes(block.p.spec.full_sizes).items()
    }
    check_tensors(files, expected)
    derived = {name for name in files.names if _DERIVED.search(name)}
    refuse_unknown(files, {*expected, *derived, *names.tied()})
    model.to(device)
    with torch.no_grad():
        for block in blocks:
            block.read(files, names)
    return model


class _Names:
    """The names of the tensors in the files, which may be those of the body alone."""

    def __init__(self, files: PretrainedFiles, model: Transformer) -> None:
        self._body = f"{model.names.body.partition('.')[0]}."
        self._bare = not any(name.startswith(self._body) for name in files.names)
        self._is_tied = model.config.tie_embeddings

    def of(self, name: str) -> str:
        return name.removeprefix(self._body) if self._bare else name

    def tied(self) -> tuple[str, ...]:
        """The names of tensors that are the same as another one."""
        return ("lm_head.weight",) if self._is_tied else ()


class _Block(NamedTuple):
    """This rank's block of a parameter, and where the files have it."""

    p: ShardedParameter
    stored: Stored

    def read(self, files: PretrainedFiles, names: _Names) -> None:
        """Fills the block from the files."""
        p = self.p
        offsets, sizes = p.grid.local_block(p.spec.full_sizes, p.spec.dims)

        def read_rows(name: str, rows: range, columns: range | None) -> Tensor:
            return files.read(names.of(name), rows, columns)

        p.parameter.copy_(self.stored.read(offsets, sizes, read_rows))


def _agree(grid: Grid, error: ValueError | None) -> None:
    """Raises the error of this rank, or that of another one, so that no rank waits for it."""
    errors: list[str | None] = [None if error is None else str(error)] * grid.world_size
    if grid.world_size > 1:
        dist.all_gather_object(errors, errors[0])
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text is not None:
            raise InputError(f"rank {rank}: {text}")
