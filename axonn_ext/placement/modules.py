"""The modules that take the place of others in a tree, and what moves features around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from axonn_ext.grid import Grid
from axonn_ext.models.stored import Stored
from axonn_ext.nn import Embedding, Linear
from axonn_ext.placement.layouts import convert
from axonn_ext.state import NamedState


class PlacedConv1D(Linear, NamedState):
    """The Linear in place of transformers' Conv1D, whose whole weight is [K, N].

    order: row i of the Linear's weight is column order[i] of the Conv1D's; None: the same order.
    """

    order: Tensor | None = None

    def _stored(self, name: str) -> Stored:
        return Stored(((name, self.out_features),), self.order, transposed=True)

    def export_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        public: dict[str, Tensor] = {}
        for name, tensor in state.items():
            public |= self._stored(name).export(tensor)
        return public

    def import_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._stored(name).restore(state) for name in state}


class PlacedEmbedding(Embedding):
    """The Embedding in place of torch's: ids [...] -> [..., H / Gy].

    padding_idx: the id whose row gets no gradient from here; None: none.
    """

    padding_idx: int | None = None

    def forward(self, ids: Tensor, weight: Tensor | None = None) -> Tensor:
        return super().forward(ids, weight).unflatten(0, ids.shape)

    def _look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        rows = super()._look_up(ids, table)
        if self.padding_idx is None:
            return rows
        has_gradient = (ids.flatten() != self.padding_idx)[:, None]
        return torch.where(has_gradient, rows, rows.detach())


class ConvertInputs:
    """A forward pre-hook that moves arguments, given by position or name, to another layout."""

    def __init__(self, grid: Grid, arrives: Mapping[int | str, str], reads: str) -> None:
        self.grid, self.arrives, self.reads = grid, dict(arrives), reads

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(self._converted(key, value) for key, value in enumerate(args)),
            {key: self._converted(key, value) for key, value in kwargs.items()},
        )

    def _converted(self, key: int | str, value: Any) -> Any:
        if key not in self.arrives or not isinstance(value, Tensor):
            return value
        return convert(value, self.grid, self.arrives[key], self.reads)


class GatherResults:
    """A forward hook of a model that makes results whole: tensors, by their position or name.

    results: the layout of each, and how many features this rank has of it. What has other features
    than these is another result, as where a loss comes first, and is left alone.
    """

    def __init__(self, grid: Grid, results: Mapping[int | str, tuple[str, int]]) -> None:
        self.grid, self.results = grid, dict(results)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._whole(0, output)
        if isinstance(output, Mapping):
            for key in self.results.keys() & output.keys():
                output[key] = self._whole(key, output[key])  # type: ignore[index]
            return output
        if type(output) in (tuple, list):
            return type(output)(self._whole(key, value) for key, value in enumerate(output))
        return output

    def _whole(self, key: int | str, value: Any) -> Any:
        layout, features = self.results.get(key, ("", 0))
        if not layout or not isinstance(value, Tensor) or not value.dim():
            return value
        return convert(value, self.grid, layout, "whole") if value.shape[-1] == features else value


class ConvertOutputs:
    """A forward hook that moves outputs, by their number, from a layout to others."""

    def __init__(self, grid: Grid, have: str, leaves: Mapping[int, str]) -> None:
        self.grid, self.have, self.leaves = grid, have, dict(leaves)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        tensors, structure = tree_flatten(output)
        for index, want in self.leaves.items():
            tensors[index] = convert(tensors[index], self.grid, self.have, want)
        return tree_unflatten(tensors, structure)
