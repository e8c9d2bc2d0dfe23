"""The modules that replace others in a tree, and the hooks that move features around them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from axonn_ext.checkpoint.whole_tensors import NamedState
from axonn_ext.models.parallelize.layouts import convert
from axonn_ext.models.parallelize.results import Key, mapped, shown
from axonn_ext.models.stored import Stored
from axonn_ext.nn import Embedding, Linear
from axonn_ext.ranks.grid import Grid


class PlacedLinear(Linear, NamedState):
    """Replaces a Linear whose whole weight is stored in another way.

    order: row i of this weight is row order[i] of the stored one; None: the same order.
    transposed: the stored weight is [K, N], as that of transformers' Conv1D.
    """

    order: Tensor | None = None
    transposed = False

    def _stored(self, name: str) -> Stored:
        return Stored(((name, self.out_features),), self.order, self.transposed)

    def export_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        public: dict[str, Tensor] = {}
        for name, tensor in state.items():
            public |= self._stored(name).export(tensor)
        return public

    def import_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._stored(name).restore(state) for name in state}


class PlacedEmbedding(Embedding):
    """Replaces torch's Embedding: ids [...] -> [..., H / Gy].

    padding_idx: the id whose row gets no gradient here; None: none.
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
    """A forward pre-hook that converts arguments, given by position or name, to another layout."""

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
    """A forward hook of a model that makes results whole: tensors, by their place in the output.

    results: the layout of each result, and its number of features on this rank. known: the places
    of all tensors in the example's output. A tensor in another place is not touched, unless its
    number of features is that of a result: then ValueError is raised, since it may be split.
    """

    def __init__(
        self, grid: Grid, results: Mapping[Key, tuple[str, int]], known: Collection[Key]
    ) -> None:
        self.grid, self.results, self.known = grid, dict(results), frozenset(known)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return mapped(output, self._whole)

    def _whole(self, key: Key, value: Tensor) -> Tensor:
        if not value.dim() or not value.is_floating_point():
            return value
        layout, features = self.results.get(key, ("", 0))
        if layout and value.shape[-1] == features:
            return convert(value, self.grid, layout, "whole")
        if key not in self.known:
            self._refuse_unknown(key, value)
        return value

    def _refuse_unknown(self, key: Key, value: Tensor) -> None:
        for layout, features in self.results.values():
            if self.grid.size(layout) > 1 and value.shape[-1] == features:
                raise ValueError(
                    f"parallelize: output {shown(key)} has shape {list(value.shape)}, and may be "
                    f"split over {layout}; the example inputs gave no such output: pass "
                    "example_inputs with which the model returns it"
                )


class ConvertOutputs:
    """A forward hook that converts outputs, given by index, from one layout to others."""

    def __init__(self, grid: Grid, have: str, leaves: Mapping[int, str]) -> None:
        self.grid, self.have, self.leaves = grid, have, dict(leaves)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        tensors, structure = tree_flatten(output)
        for index, want in self.leaves.items():
            tensors[index] = convert(tensors[index], self.grid, self.have, want)
        return tree_unflatten(tensors, structure)
