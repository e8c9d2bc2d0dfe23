"""How Hugging Face's models store our parameters, some of which fuse several of theirs.

One description per parameter defines every conversion: of whole tensors in both directions, and of
the slices of files that a rank's block needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.spec.model import ModelConfig

# Returns rows [first, last) of a stored tensor and, for a matrix, columns [first, last).
ReadRows = Callable[[str, range, range | None], Tensor]


@dataclass(frozen=True)
class Stored:
    """Where the rows of one of our parameters, a matrix [out, in] or a vector, are stored.

    parts: the names of the stored tensors, and the number of rows of each. Rows are numbered across
        all parts.
    order: row i of ours is row order[i] of theirs; None: the rows of a single part, in order.
    transposed: they are stored as [in, out], so that a row of ours is a column there.
    """

    parts: tuple[tuple[str, int], ...]
    order: Tensor | None = None
    transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored tensors."""
        return tuple(name for name, _ in self.parts)

    def shapes(self, full_sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the stored tensors, given the whole sizes of our parameter."""
        rest = tuple(full_sizes[1:])
        shapes = ((rows, *rest) for _, rows in self.parts)
        turned = (shape[::-1] if self.transposed else shape for shape in shapes)
        return dict(zip(self.names, turned, strict=True))

    def export(self, whole: Tensor) -> dict[str, Tensor]:
        """Returns the stored tensors of our whole parameter."""
        if self.order is not None:
            inverse = torch.empty_like(self.order)
            inverse[self.order] = torch.arange(len(self.order))
            whole = whole.index_select(0, inverse.to(whole.device))
        rows = [rows for _, rows in self.parts]
        pieces = (whole,) if len(rows) == 1 else whole.split(rows)
        if self.transposed and whole.dim() == 2:
            pieces = tuple(piece.t().contiguous() for piece in pieces)
        return dict(zip(self.names, pieces, strict=True))

    def restore(self, state: Mapping[str, Tensor]) -> Tensor:
        """Returns our whole parameter, given the stored tensors: the reverse of `export`."""
        pieces = [state[name] for name in self.names]
        if self.transposed and pieces[0].dim() == 2:
            pieces = [piece.t() for piece in pieces]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole if self.order is None else whole.index_select(0, self.order.to(whole.device))

    def read(self, offsets: Sequence[int], sizes: Sequence[int], read_rows: ReadRows) -> Tensor:
        """Returns a block of our parameter; reads only the rows that it needs."""
        rows = range(offsets[0], offsets[0] + sizes[0])
        columns = range(offsets[1], offsets[1] + sizes[1]) if len(sizes) == 2 else None

        def read(name: str, rows: range) -> Tensor:
            if self.transposed and columns is not None:
                return read_rows(name, columns, rows).t()
            return read_rows(name, rows, columns)

        if self.order is None:
            return read(self.names[0], rows)
        wanted = self.order[rows.start : rows.stop]
        found, places, start = [], [], 0
        for name, count in self.parts:
            here = ((wanted >= start) & (wanted < start + count)).nonzero().flatten()
            own, order = (wanted[here] - start).sort()
            found += [read(name, run) for run in _runs(own.tolist())]
            places.append(here[order])
            start += count
        return torch.cat(found).index_select(0, torch.cat(places).argsort())


def _runs(rows: Sequence[int]) -> Iterator[range]:
    """Yields the runs of consecutive rows, given sorted rows."""
    first = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield range(rows[first], rows[end - 1] + 1)
            first = end


def stored(config: ModelConfig, name: str, rows: int) -> Stored:
    """Returns how transformers' model of the family stores one of our parameters.

    rows: the parameter's whole number of rows.
    """
    names = config.traits.hugging_face.names
    if not name.startswith("blocks."):
        return Stored(((names.public(name), rows),))
    _, number, rest = name.split(".", 2)
    module, _, own = rest.rpartition(".")
    if module == "attention.qkv":
        heads = (config.num_heads, config.kv_heads, config.kv_heads)
        sizes, modules = [count * config.head_dim for count in heads], names.qkv
        order = _qkv_order(config)
    elif module == "mlp.up" and config.traits.gated:
        sizes, modules = [config.mlp_size] * 2, names.gate_up
        order = _gate_up_order(config.mlp_size)
    else:
        return Stored(((names.public(name), rows),), transposed=names.transposed)
    sizes = sizes if len(modules) > 1 else [rows]
    public = (f"{names.of_block(number)}{module}.{own}" for module in modules)
    return Stored(tuple(zip(public, sizes, strict=True)), order, names.transposed)


def _qkv_order(config: ModelConfig) -> Tensor | None:
    """Returns the index of each row of our fused qkv weight in the stored rows of q, k and v.

    Ours are [q.., k, v] for each key-value head, and pairs of rotated features are half the rotated
    features apart.
    """
    traits, size = config.traits, config.head_dim
    heads, kv_heads = config.num_heads, config.kv_heads
    if traits.hugging_face.names.grouped:
        per_group = heads // kv_heads
        rows = torch.arange(config.qkv_size).view(kv_heads, per_group + 2, size)
        q, k, v = rows.split([per_group, 1, 1], 1)
    else:
        rows = torch.arange(config.qkv_size).view(-1, size)
        parts = rows.split([heads, kv_heads, kv_heads])
        q, k, v = (part.view(kv_heads, -1, size) for part in parts)
    if traits.interleaved:
        rotated = torch.arange(config.rotary_dim).view(-1, 2).t().flatten()
        features = torch.cat([rotated, torch.arange(config.rotary_dim, size)])
        q, k = q[..., features], k[..., features]
    elif traits.hugging_face.names.grouped:
        return None
    return torch.cat([q, k, v], 1).flatten()


def _gate_up_order(size: int) -> Tensor:
    """Returns the index of each row of a fused weight gate, up, gate, ... in gate's, then up's."""
    return torch.arange(2 * size).view(2, size).t().flatten()
