"""Batches as a pure function of (seed, step, sequence), without state, the same on every grid.

B  sequences of one global batch (one optimizer step)   S  tokens of a sequence
A  micro-batches of a step        G  row groups (size of data times size of z)

A global batch is batch-major. Micro-batch j is its sequences [j B/A, (j+1) B/A), and row group
g = data_coord * G_z + z_coord reads its contiguous block g of B/(A G) sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axonn_ext.data.vocabulary import TokenArray

_PHILOX_WORDS = 4  # the 64-bit words that Philox draws for one counter


@dataclass(frozen=True)
class RowGroup:
    """The part number `index`, of `count` contiguous parts of a micro-batch, that a rank reads."""

    index: int = 0
    count: int = 1

    def share(self, num_sequences: int) -> tuple[int, int]:
        """Returns the first sequence and the number of sequences of this group's block."""
        if num_sequences % self.count:
            raise ValueError(
                f"a micro-batch of {num_sequences} sequences must be divisible by the "
                f"{self.count} (data, z) groups"
            )
        size = num_sequences // self.count
        return self.index * size, size


class TrainingBatches:
    """Random windows of the text.

    Philox with the key (seed, t) draws the start of sequence i of step t at counter i. So any rank
    can draw any sequence without drawing those before it, and a resumed run needs only the step.

    Raises: ValueError if the text is shorter than one sequence, or if micro-batches and row groups
        do not divide the batch.
    """

    def __init__(
        self,
        tokens: TokenArray,
        *,
        sequence_length: int,
        batch_size: int,
        num_micro_batches: int = 1,
        seed: int = 0,
        group: RowGroup | None = None,
    ) -> None:
        _check_length(tokens, sequence_length, "training")
        if batch_size % num_micro_batches:
            raise ValueError(
                f"batch_size {batch_size} must be divisible by {num_micro_batches} micro-batches"
            )
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._seed = seed
        self._micro_batch_size = batch_size // num_micro_batches
        self._first, self._count = (group or RowGroup()).share(self._micro_batch_size)
        self.num_micro_batches = num_micro_batches
        self.tokens_per_step = batch_size * sequence_length

    def micro_batch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Returns the row group's token ids and labels of a micro-batch, int64 [B/(A G), S]."""
        first = index * self._micro_batch_size + self._first
        draws = _philox(self._seed, step, first, self._count)
        num_starts = len(self._tokens) - self._sequence_length
        # The modulo makes no start more likely than another by a share above num_starts / 2**64.
        starts = (draws % np.uint64(num_starts)).astype(np.int64)
        return _windows(self._tokens, starts, self._sequence_length)


class EvaluationBatches:
    """Evenly spaced windows of the held-out text, the same at every evaluation."""

    def __init__(
        self,
        tokens: TokenArray,
        *,
        sequence_length: int,
        batch_size: int,
        num_batches: int,
        group: RowGroup | None = None,
    ) -> None:
        _check_length(tokens, sequence_length, "held-out")
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._first, self._count = (group or RowGroup()).share(batch_size)
        self.num_batches = num_batches
        self.num_tokens = num_batches * batch_size * sequence_length

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns this row group's token ids and labels of evaluation batch `index`."""
        num_windows = self.num_batches * self._batch_size
        windows = index * self._batch_size + self._first + np.arange(self._count, dtype=np.int64)
        last_start = len(self._tokens) - self._sequence_length - 1
        starts = windows * last_start // max(1, num_windows - 1)
        return _windows(self._tokens, starts, self._sequence_length)


def _philox(seed: int, step: int, first: int, count: int) -> NDArray[np.uint64]:
    """Draws 64 bits for each counter first .. first + count - 1, with the key (seed, step)."""
    key = np.array([seed, step], dtype=np.uint64)
    counter = np.array([first, 0, 0, 0], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    return generator.random_raw(_PHILOX_WORDS * count)[::_PHILOX_WORDS]


def _windows(
    tokens: TokenArray, starts: NDArray[np.int64], sequence_length: int
) -> tuple[Tensor, Tensor]:
    """Returns token ids, and as labels the ids of the next tokens, which the model must predict."""
    places = starts[:, None] + np.arange(sequence_length + 1)
    window = torch.from_numpy(tokens[places].astype(np.int64))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _check_length(tokens: TokenArray, sequence_length: int, part: str) -> None:
    if len(tokens) <= sequence_length:
        raise ValueError(
            f"the {part} text has {len(tokens)} tokens, but a sequence of {sequence_length} with "
            f"its labels needs {sequence_length + 1}"
        )
