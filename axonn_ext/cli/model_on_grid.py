"""A Hugging Face model on a grid, as commands check and load it."""

from __future__ import annotations

from pathlib import Path

import torch

from axonn_ext import Grid, from_pretrained, load_adapter, merge_adapters, models
from axonn_ext.data import Vocabulary, open_vocabulary
from axonn_ext.data.tokenizer_files import TOKENIZER
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.transformer import Transformer
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import is_file
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.grids import check_processes

DTYPES = {
    "auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16
}  # fmt: skip
PARALLEL = ParallelConfig(layout="replicated")


def check_grid(config: ModelConfig, shape: GridShape) -> None:
    """Raises UserError if the grid is too large for one machine or does not divide the model."""
    check_processes(shape)
    groups = shape.data * shape.z
    if problems := models.check(config, PARALLEL, shape, batch_size=groups, pretrained=True):
        raise UserError(*problems)


def check_started(shape: GridShape, here: Process | None) -> None:
    """Raises UserError if the grid has not as many processes as were started."""
    world_size = 1 if here is None else here.world_size
    if shape.size != world_size:
        raise UserError(
            f"--grid {shape} has {shape.size} processes, but torchrun started {world_size}"
        )


def device_of(asked: str) -> str:
    """Returns the type of device for --device. Raises UserError if there is none of it."""
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise UserError("--device cuda: torch sees no GPU here; use cpu or auto")
    return asked if asked != "auto" else "cuda" if has_gpu else "cpu"


def model_vocabulary(folder: Path, name: str | None) -> Vocabulary:
    """Returns the named vocabulary, or the model's. Raises UserError if there is none."""
    if name is None and not is_file(folder / TOKENIZER):
        raise UserError(
            f"{folder / TOKENIZER}: not found; give --vocabulary FILE (of the tokenizers "
            "library), or --vocabulary bytes for a model that was trained on bytes"
        )
    try:
        return open_vocabulary(name or str(folder / TOKENIZER))
    except ValueError as error:
        raise UserError(f"--vocabulary: {error}") from None


def load_model(
    folder: Path, grid: Grid, *, device: str, dtype: str = "auto", adapter: str | None = None,
    sequence_length: int | None = None,
) -> Transformer:  # fmt: skip
    """Returns the model, with an adapter merged into it. Raises UserError.

    dtype: a key of DTYPES. Collectives: those of `from_pretrained` and `load_adapter`.
    """
    try:
        model = from_pretrained(
            folder, grid, PARALLEL, dtype=DTYPES[dtype], device=device,
            sequence_length=sequence_length,
        )  # fmt: skip
        if adapter is not None:
            load_adapter(model, adapter)
            merge_adapters(model)
    except (InputError, ValueError) as error:
        raise UserError(str(error)) from None
    return model
