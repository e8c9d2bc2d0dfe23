"""Weights that a folder stores in FP8, with their scales: weight = stored value * scale.

Folders of fine-grained FP8 (DeepSeek, Qwen), compressed-tensors and FBGEMM have a scale for each
tensor, each row [rows, 1], or each block of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonn_ext.spec.files.files import read_json

FP8 = "F8_E4M3"  # safetensors' name
_OF_WEIGHTS = ("_scale_inv", "_scale")  # follow the name of the weight
# Scales of activations and caches, for inference in FP8.
_UNUSED = (
    "input_scale",
    "input_scale_ub",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
)
_BLOCK = (128, 128)


class Scales:
    """The scales among a folder's tensors.

    names: of all tensors. is_fp8: whether a tensor is stored in FP8. config: the file config.json.
    """

    def __init__(self, names: Iterable[str], is_fp8: Callable[[str], bool], config: Path) -> None:
        every = set(names)
        self._of = {
            name: name + ending
            for name in every
            for ending in _OF_WEIGHTS
            if name + ending in every and is_fp8(name)
        }
        self.names, self._block = frozenset[str](), _BLOCK
        if self._of:
            unused = (name for name in every if name.rpartition(".")[2] in _UNUSED)
            self.names = frozenset({*self._of.values(), *unused})
            self._block = _block_of(read_json(config))

    def of(self, name: str) -> str | None:
        """Returns the name of a weight's scales; None if it has none."""
        return self._of.get(name)

    def of_elements(
        self, scales: Tensor, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        """Returns factors in fp32 for these rows and columns of a weight, or shaped to broadcast.

        scales: of the whole weight, whose shape is given. Raises ValueError for scales that do not
        fit it or are not finite.
        """
        if not bool(scales.isfinite().all()):
            raise ValueError("finite scales, got others")
        scales = scales.float()
        if scales.numel() == 1:
            return scales.reshape(())
        height, width = self._block
        if columns is not None and scales.numel() == scales.shape[0] == shape[0]:
            return scales.reshape(-1, 1)[rows.start : rows.stop]
        wanted = [-(-shape[0] // height), -(-shape[-1] // width)]
        if columns is None or list(scales.shape) != wanted:
            raise ValueError(
                f"one scale, {shape[0]} of rows, or {wanted} of blocks of {height} x {width}, got "
                f"{list(scales.shape)}"
            )
        of_rows = torch.arange(rows.start, rows.stop) // height
        return scales[of_rows][:, torch.arange(columns.start, columns.stop) // width]


def _block_of(config: object) -> tuple[int, int]:
    """Returns the rows and columns of a block that config.json states, or 128 x 128."""
    stated = _table(config, "quantization_config")
    sizes = [stated.get("weight_block_size")]
    for name in _table(stated, "config_groups"):
        group = _table(_table(stated, "config_groups"), name)
        sizes.append(_table(group, "weights").get("block_structure"))
    for size in sizes:
        if (
            isinstance(size, list)
            and len(size) == 2
            and all(type(n) is int and n > 0 for n in size)
        ):
            return size[0], size[1]
    return _BLOCK


def _table(content: object, key: str) -> Mapping[str, Any]:
    found = content.get(key) if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else {}
