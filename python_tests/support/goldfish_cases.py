"""Goldfish loss in Python integers, as docs/memorization.md defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from axonn_ext.spec.goldfish import Goldfish

GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(word: int) -> int:
    word &= _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31


def hash_of(tokens: Sequence[int]) -> int:
    state = 0
    for token in tokens:
        state = mix(state + token + GOLDEN)
    return state


def drops(row: Sequence[int], documents: Sequence[int], place: int, goldfish: Goldfish) -> bool:
    """Whether the token at a place of a row is dropped as a target."""
    h, first = goldfish.h, place - goldfish.h
    if first < 0 or len(set(documents[first : place + 1])) > 1:
        return False
    window = row[first:place] if goldfish.window == "before" else row[first + 1 : place + 1]
    assert len(window) == h
    return hash_of(window) * goldfish.k < 2**64


def labels_of(tokens: Tensor, goldfish: Goldfish, documents: Tensor | None = None) -> Tensor:
    """The labels [.., S] of tokens [.., S + 1], computed one at a time."""
    length = tokens.shape[-1]
    numbers = torch.zeros_like(tokens) if documents is None else documents
    rows = zip(
        tokens.reshape(-1, length).tolist(), numbers.reshape(-1, length).tolist(), strict=True
    )
    labels = [
        [-100 if drops(row, of, place, goldfish) else row[place] for place in range(1, length)]
        for row, of in rows
    ]
    return torch.tensor(labels, dtype=torch.int64).reshape(*tokens.shape[:-1], length - 1)
