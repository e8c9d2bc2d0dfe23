"""Rotary positions of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_ext.kernels import host
from axonn_ext.spec.rope import RopeScaling, frequencies


class Rotary(nn.Module):
    """Rotary position embedding, which rotates feature i of a head together with i + head_dim / 2.

    head_dim: the number of features that are rotated, the first of each head. Source: Su et al.,
    arXiv:2104.09864. Llama's public weights pair the features in the same way.

    Raises ValueError for an odd head_dim, or if this machine lacks the memory for the tables.
    """

    def __init__(
        self,
        head_dim: int,
        max_length: int,
        theta: float = 10000.0,
        *,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"Rotary: head_dim must be even, got {head_dim}")
        needed = 4 * 8 * max_length * head_dim  # the tables in fp64 below, two of which stay
        there = host.memory_bytes()
        if needed > there / 2:
            raise ValueError(
                f"Rotary: the tables of {max_length:,} positions need {needed / 1e9:,.1f} GB, this "
                f"machine has {there / 1e9:,.1f} GB: give a smaller sequence_length"
            )
        self._head_dim, self._theta, self._scaling = head_dim, theta, scaling
        self._last: tuple[int, Tensor, Tensor] | None = None  # of dynamic: a length, its tables
        self.cos: Tensor
        self.sin: Tensor
        self._set("", max_length, 0)
        if scaling is not None and scaling.has_long_tables(max_length):
            self._set("long_", max_length, max_length)

    def _set(self, prefix: str, rows: int, length: int) -> None:
        """Registers the tables of sequences of this length."""
        cos, sin = self._tables(rows, length)
        self.register_buffer(f"{prefix}cos", cos, persistent=False)
        self.register_buffer(f"{prefix}sin", sin, persistent=False)

    def _tables(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [rows, head_dim] for sequences of this length."""
        found, factor = frequencies(self._theta, self._head_dim, self._scaling, length)
        angles = torch.outer(
            torch.arange(rows, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
        )
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * factor, angles.sin() * factor

    def _tables_of(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the tables for sequences of this length."""
        if self._scaling is None or not self._scaling.changes_at(length):
            return self.cos, self.sin
        if self._scaling.has_long_tables(length):
            return self.get_buffer("long_cos"), self.get_buffer("long_sin")
        if self._last is None or self._last[0] != length:
            cos, sin = self._tables(len(self.cos), length)
            self._last = length, cos.to(self.cos.device), sin.to(self.cos.device)
        return self._last[1:]

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        positions: Tensor | None = None,
        lengths: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns q and k, [sequences, heads, length, head_dim], rotated by their positions.

        positions: [sequences, length]; None: 0, 1, 2, ... in each sequence. lengths: the tokens of
        the sequences, of each or of all, with those before these; default those of the queries. It
        matters to dynamic and longrope only.
        """
        length = queries.shape[-2] if lengths is None else lengths
        if isinstance(length, Tensor) and (self._scaling is None or not self._scaling.by_length):
            length = 0
        if isinstance(length, Tensor):
            assert positions is not None
            tables = [self._tables_of(int(n)) for n in length]
            cos, sin = (
                torch.stack([table[places] for table, places in zip(kind, positions, strict=True)])
                for kind in zip(*tables, strict=True)
            )
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        else:
            cos, sin = self._tables_of(length)
            if positions is None:
                cos, sin = cos[: queries.shape[-2]], sin[: queries.shape[-2]]
            else:
                cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        cos, sin = cos.to(queries.dtype), sin.to(queries.dtype)
        return _rotated(queries, cos, sin), _rotated(keys, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([_rotated(x[..., :size], cos, sin), x[..., size:]], -1)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
