"""Batches as a pure function of (seed, step, sequence), without state, the same on every grid.

B  sequences of one global batch (one optimizer step)   S  tokens of a sequence
A  micro-batches of a step        G  row groups (size of data times size of z)

A global batch is batch-major: step t has the sequences [t B, (t+1) B) of the order, shifted in a
run that resumes with another B, so that it reads each once. Micro-batch j is its sequences
[j B/A, (j+1) B/A), and row group g = data_coord * G_z + z_coord reads its contiguous block g of
B/(A G) sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from axonn_ext.data.mixture import shares
from axonn_ext.data.orders import Order, check_length, windows
from axonn_ext.data.tokens import Part
from axonn_ext.nn import goldfish_labels
from axonn_ext.spec.goldfish import Goldfish

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Batch(NamedTuple):
    """A row group's part of a micro-batch, int64 [B/(A G), S] each.

    labels: the ids of the next tokens, which the model must predict; -100: none.
    documents: a number for each token, which changes where a document begins that cannot attend to
    earlier ones; None: each sequence is one document.
    """

    token_ids: Tensor
    labels: Tensor
    documents: Tensor | None = None


class Batches(Protocol):
    """The interface of training batches for the trainer.

    shift: number of sequences by which the steps before a change of the batch size exceed the same
    number of steps now.
    """

    num_micro_batches: int
    tokens_per_step: int
    shift: int

    def micro_batch(self, step: int, index: int) -> Batch:
        """Returns the row group's part of a micro-batch."""
        ...

    def num_labels(self, step: int) -> float:
        """Returns the number of labels in a step, over all ranks, before any are dropped."""
        ...


class Evaluation(Protocol):
    """The interface of evaluation batches. num_labels: over all batches and ranks."""

    num_batches: int
    num_labels: float

    def batch(self, index: int) -> Batch:
        """Returns the row group's part of a batch."""
        ...


@dataclass(frozen=True)
class RowGroup:
    """Part number `index` of the `count` contiguous parts of a micro-batch, read by a rank."""

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


@dataclass(frozen=True)
class BatchShares:
    """The sequences of a step's batch that a row group reads: `count` of each micro-batch.

    Raises: ValueError if micro-batches and row groups do not divide the batch.
    """

    batch_size: int
    num_micro_batches: int
    group: RowGroup

    def __post_init__(self) -> None:
        if self.batch_size % self.num_micro_batches:
            raise ValueError(
                f"batch_size {self.batch_size} must be divisible by {self.num_micro_batches} "
                "micro-batches"
            )
        self.group.share(self.batch_size // self.num_micro_batches)

    @property
    def count(self) -> int:
        return self.group.share(self.batch_size // self.num_micro_batches)[1]

    def first(self, step: int, index: int) -> int:
        """Returns the number of the group's first sequence of a micro-batch, without a shift."""
        size = self.batch_size // self.num_micro_batches
        return step * self.batch_size + index * size + self.group.share(size)[0]


class TrainingBatches:
    """The sequences of an order, batch by batch.

    Any rank can read any sequence without reading earlier ones, and a resumed run needs only the
    step. goldfish: drops labels; None: every token has one.

    Raises: ValueError if micro-batches and row groups do not divide the batch.
    """

    def __init__(
        self,
        order: Order,
        *,
        batch_size: int,
        num_micro_batches: int = 1,
        group: RowGroup | None = None,
        goldfish: Goldfish | None = None,
    ) -> None:
        self._order, self._goldfish = order, goldfish
        self._shares = BatchShares(batch_size, num_micro_batches, group or RowGroup())
        self.num_micro_batches = num_micro_batches
        self.tokens_per_step = batch_size * order.sequence_length
        self.shift = 0

    def num_labels(self, step: int) -> float:
        """Returns the number of labels of a step: one per token."""
        return float(self.tokens_per_step)

    def micro_batch(self, step: int, index: int) -> Batch:
        """Returns the row group's part of a micro-batch.

        Raises: ValueError if a file has changed or is damaged.
        """
        first, count = self._shares.first(step, index) + self.shift, self._shares.count
        batch = _inputs_and_labels(window := self._order.sequences(first, count))
        if self._goldfish is None:
            return batch
        labels = goldfish_labels(
            torch.from_numpy(window), self._goldfish,
            documents=torch.from_numpy(self._order.documents(first, count)),
        )  # fmt: skip
        return batch._replace(labels=labels)


class EvaluationBatches:
    """Evenly spaced windows of the held-out text, the same at every evaluation.

    Several parts share the windows by weight; the windows of the first part come first.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        sequence_length: int,
        batch_size: int,
        num_batches: int,
        weights: Sequence[float] = (1.0,),
        group: RowGroup | None = None,
    ) -> None:
        self._sequence_length, self._batch_size = sequence_length, batch_size
        self._first, self._count = (group or RowGroup()).share(batch_size)
        self.num_batches = num_batches
        self.num_labels = float(num_batches * batch_size * sequence_length)
        self._parts = list(zip(parts, shares(weights, num_batches * batch_size), strict=True))
        for part, share in self._parts:
            if share or len(self._parts) == 1:
                check_length(part, sequence_length, "held-out")

    def batch(self, index: int) -> Batch:
        """Returns the row group's part of evaluation batch `index`."""
        begin = index * self._batch_size + self._first
        rows, before = [], 0
        for part, share in self._parts:
            mine = np.arange(max(begin, before), min(begin + self._count, before + share))
            last_start = part.count - self._sequence_length - 1
            starts = (mine - before).astype(np.int64) * last_start // max(1, share - 1)
            rows.append(windows(part, starts, self._sequence_length))
            before += share
        return _inputs_and_labels(np.concatenate(rows))


def _inputs_and_labels(rows: NDArray[np.int64]) -> Batch:
    window = torch.from_numpy(rows)
    return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())
