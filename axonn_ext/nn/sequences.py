"""Positions and masks of tokens in their sequences, and the KV cache of earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens of a (data, z) group stand, for B sequences of S tokens.

    positions: [B, S], each token's position in its document
    mask: [B, 1, S, T], whether a token attends to each of T tokens; None: causal
    lengths: [B], the tokens of each sequence, on which some kinds of rotation depend; None: T
    """

    positions: Tensor
    mask: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def packed(cls, documents: Tensor) -> Places:
        """Returns the places in sequences of several concatenated documents.

        documents: [B, S], a number for each token, which changes where another document begins.
        Positions begin at 0 in each document, and no token attends to another document.
        """
        length = documents.shape[1]
        places = torch.arange(length, device=documents.device)
        begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
        firsts = (places * begins).cummax(1).values
        # A token attends to the tokens from the first of its document up to itself.
        mask = (places >= firsts[:, :, None]) & (places <= places[:, None])
        return cls(places - firsts, mask.unsqueeze(1))

    @classmethod
    def cached(cls, positions: Tensor, lengths: Tensor | None = None) -> Places:
        """Returns the places of tokens that also attend to earlier, cached tokens.

        positions: [B, S].
        """
        slots = torch.arange(int(positions.max()) + 1, device=positions.device)
        return cls(positions, (slots <= positions[:, :, None]).unsqueeze(1), lengths)


class KeyValueCache:
    """The keys and values of the tokens that one attention has seen: [B, heads, slots, D] each.

    The token at position p of a sequence has slot p. slots: the maximum length of a sequence.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(
        self, keys: Tensor, values: Tensor, positions: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, heads, S, D] in their slots; returns the first slots.

        positions: [B, S]. length: number of slots to return.
        """
        if self._keys is None or self._values is None:
            batch, heads, _, size = keys.shape
            self._keys = keys.new_zeros(batch, heads, self._slots, size)
            self._values = torch.zeros_like(self._keys)
        slots = positions[:, None, :, None].expand_as(keys)
        self._keys.scatter_(2, slots, keys)
        self._values.scatter_(2, slots, values)
        return self._keys[:, :, :length], self._values[:, :, :length]
