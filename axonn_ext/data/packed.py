"""Batches of sequences that each pack several examples, which do not attend to each other.

Legend as in batches.py.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import torch

from axonn_ext.data.batches import Batch, BatchShares, RowGroup
from axonn_ext.data.examples import Example, pack
from axonn_ext.data.permutation import EXAMPLES, Permutation
from axonn_ext.data.vocabulary import TokenArray
from axonn_ext.nn import goldfish_labels
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.spec.goldfish import Goldfish


class PackedBatches:
    """All examples once per epoch, in a new order each epoch, packed into sequences.

    Epoch e has the examples in the order of the Permutation with the key (seed, EXAMPLES, e).
    Sequences continue across epoch ends; step t has those from t B on. A resumed run needs only
    the step, though it packs the epochs before it again. goldfish: drops labels, always the same
    ones of an example wherever it is packed; prompts count as preceding tokens.

    epochs: number of epochs after which all sequences are empty, so that each example is seen
    exactly `epochs` times in the first num_steps steps; 0: no end.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        sequence_length: int,
        batch_size: int,
        num_micro_batches: int = 1,
        seed: int = 0,
        epochs: int = 0,
        group: RowGroup | None = None,
        goldfish: Goldfish | None = None,
    ) -> None:
        self._examples, self._length, self._seed = examples, sequence_length, seed
        self._goldfish, self._epochs = goldfish, epochs
        self._shares = BatchShares(batch_size, num_micro_batches, group or RowGroup())
        self._ends: list[int] = []  # of the packed epochs, in sequences
        self._packed: dict[int, list[list[int]]] = {}  # two epochs, as a step may span both
        self.num_micro_batches = num_micro_batches
        self.tokens_per_step = batch_size * sequence_length
        self.shift = 0

    def micro_batch(self, step: int, index: int) -> Batch:
        """Returns the row group's part of a micro-batch."""
        first = self._shares.first(step, index) + self.shift
        numbers = [self._sequence(first + place) for place in range(self._shares.count)]
        return _batch(self._examples, numbers, self._length, self._goldfish)

    def num_labels(self, step: int) -> float:
        """Returns the number of labels in a step, over all ranks, before any are dropped."""
        size = self._shares.batch_size
        first = step * size + self.shift
        numbers = (self._sequence(first + place) for place in range(size))
        return float(sum(self._examples[n].num_labels for each in numbers for n in each))

    def num_sequences(self, epochs: int) -> int:
        """Returns the number of sequences in `epochs` epochs."""
        while len(self._ends) < epochs:
            self._pack(len(self._ends))
        return self._ends[epochs - 1] if epochs else 0

    def num_steps(self, epochs: int) -> int:
        """Returns the number of steps after which `epochs` epochs have been read."""
        return -(-self.num_sequences(epochs) // self._shares.batch_size)

    def _sequence(self, number: int) -> list[int]:
        if self._epochs and number >= self.num_sequences(self._epochs):
            return []
        while not self._ends or self._ends[-1] <= number:
            self._pack(len(self._ends))
        epoch = bisect.bisect_right(self._ends, number)
        if epoch not in self._packed:
            self._pack(epoch)
        return self._packed[epoch][number - (self._ends[epoch - 1] if epoch else 0)]

    def _pack(self, epoch: int) -> None:
        count = len(self._examples)
        order = Permutation(count, (self._seed, EXAMPLES, epoch)).apply(np.arange(count))
        packed = pack(self._examples, order.tolist(), self._length)
        self._packed = {e: kept for e, kept in self._packed.items() if abs(e - epoch) == 1}
        self._packed[epoch] = packed
        if epoch == len(self._ends):
            self._ends.append((self._ends[-1] if self._ends else 0) + len(packed))


class PackedEvaluation:
    """The first held-out examples, packed in order, the same at every evaluation.

    There are at most num_batches batches; the last may have sequences without examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        sequence_length: int,
        batch_size: int,
        num_batches: int,
        group: RowGroup | None = None,
    ) -> None:
        if not examples:
            raise ValueError("no example is held out for evaluation: raise data.held_out")
        self._examples, self._length, self._batch_size = examples, sequence_length, batch_size
        self._first, self._count = (group or RowGroup()).share(batch_size)
        packed = pack(examples, range(len(examples)), sequence_length)
        self._packed = packed[: num_batches * batch_size]
        self.num_batches = -(-len(self._packed) // batch_size)
        self.num_labels = float(sum(examples[n].num_labels for each in self._packed for n in each))

    def batch(self, index: int) -> Batch:
        """Returns the row group's part of evaluation batch `index`."""
        first = index * self._batch_size + self._first
        numbers = self._packed[first : first + self._count]
        return _batch(self._examples, numbers + [[]] * (self._count - len(numbers)), self._length)


def _batch(
    examples: Sequence[Example], packed: Sequence[Sequence[int]], length: int,
    goldfish: Goldfish | None = None,
) -> Batch:  # fmt: skip
    """Returns sequences of these examples; the padding is a document without labels."""
    shape = (len(packed), length)
    tokens, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    found = iter(_labels([examples[number] for numbers in packed for number in numbers], goldfish))
    for row, numbers in enumerate(packed):
        start = 0
        for place, number in enumerate(numbers, start=1):
            example = examples[number]
            end = start + example.num_places
            tokens[row, start:end] = example.tokens[:-1]
            documents[row, start:end] = place
            labels[row, start:end] = np.where(example.has_label, next(found), IGNORE_INDEX)
            start = end
    return Batch(*map(torch.from_numpy, (tokens, labels, documents)))


def _labels(examples: Sequence[Example], goldfish: Goldfish | None) -> list[TokenArray]:
    """Returns each example's labels for all tokens but the last, including the prompt's."""
    if goldfish is None or not examples:
        return [example.tokens[1:] for example in examples]
    sizes = np.array([len(example.tokens) for example in examples])
    tokens = np.concatenate([example.tokens for example in examples]).astype(np.int64)
    documents = torch.from_numpy(np.repeat(np.arange(len(examples)), sizes))
    labels = goldfish_labels(torch.from_numpy(tokens), goldfish, documents=documents).numpy()
    return [labels[end - size : end - 1] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
