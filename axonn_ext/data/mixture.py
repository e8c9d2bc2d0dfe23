"""Stateless mixtures of several corpora by weight, exact in every block of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from axonn_ext.data.orders import Order
from axonn_ext.data.permutation import MIXTURE, Permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 1024  # number of sequences in which each source has its exact share


def parse_mixture(text: str) -> tuple[tuple[str, float], ...]:
    """Returns the paths and weights of "PATH=0.7,PATH=0.3".

    A path may hold "=", but no comma.

    Raises: ValueError for anything else, and for a weight that is not a finite number > 0.
    """
    sources = []
    for part in text.split(","):
        path, separator, number = part.strip().rpartition("=")
        try:
            weight = float(number) if separator and path.strip() else math.nan
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"expected PATH=WEIGHT with a weight > 0, got {part.strip()!r}")
        sources.append((path.strip(), weight))
    return tuple(sources)


def shares(weights: Sequence[float], total: int = BLOCK) -> list[int]:
    """Returns whole numbers in the ratio of the weights that sum to `total`.

    Each is its exact share rounded down; the rest goes one by one to those with the largest
    remainders, and to the first of equal ones.
    """
    # Scale by a power of two, so that neither the sum nor a quotient overflows; no share changes.
    exponent = math.frexp(max(weights))[1]
    weights = [math.ldexp(weight, -exponent) for weight in weights]
    scale = total / math.fsum(weights)
    exact = [weight * scale for weight in weights]
    result = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: result[i] - exact[i])
    for index in by_remainder[: total - sum(result)]:
        result[index] += 1
    return result


class Mixture:
    """Sequences of several orders, of which order i has `shares[i]` of every BLOCK sequences.

    In block b the Permutation of BLOCK with the key (seed, MIXTURE, b) sends place r to a number;
    the first shares[0] numbers are the first source's, and so on. So the number of a source's
    sequences before any place is known without iteration, and each source runs through its own
    sequences 0, 1, 2, ... in turn.

    Raises: ValueError for shares that do not sum to BLOCK, or a source without a share.
    """

    def __init__(self, orders: Sequence[Order], shares: Sequence[int], *, seed: int = 0) -> None:
        if len(orders) != len(shares) or sum(shares) != BLOCK or min(shares) < 1:
            raise ValueError(
                f"expected a share >= 1 for each of {len(orders)} sources, which sum to {BLOCK}, "
                f"got {list(shares)}"
            )
        self.sequence_length = orders[0].sequence_length
        self._orders, self._shares, self._seed = list(orders), np.array(shares), seed
        self._ends = np.cumsum(self._shares)

    def sequences(self, first: int, count: int) -> NDArray[np.int64]:
        return self._rows(first, count, [order.sequences for order in self._orders])

    def documents(self, first: int, count: int) -> NDArray[np.int64]:
        return self._rows(first, count, [order.documents for order in self._orders])

    def _rows(
        self, first: int, count: int, looks: Sequence[Callable[[int, int], NDArray[np.int64]]]
    ) -> NDArray[np.int64]:
        """Returns a row per sequence, read from its source by the source's entry of `looks`."""
        sources, numbers = self.places(first, count)
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        for index, look in enumerate(looks):
            mine = np.flatnonzero(sources == index)
            if len(mine):  # with consecutive numbers
                rows[mine] = look(int(numbers[mine[0]]), len(mine))
        return rows

    def places(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of each sequence, and the sequence's number in that source."""
        blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
        pairs = [self._block(block) for block in blocks]
        skipped = first - blocks[0] * BLOCK if pairs else 0
        sources = np.concatenate([sources for sources, _ in pairs] or [np.empty(0, np.int64)])
        numbers = np.concatenate([numbers for _, numbers in pairs] or [np.empty(0, np.int64)])
        kept = slice(skipped, skipped + count)
        return sources[kept], numbers[kept]

    def _block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = Permutation(BLOCK, (self._seed, MIXTURE, block))
        sent = order.apply(np.arange(BLOCK, dtype=np.int64))
        sources = np.searchsorted(self._ends, sent, side="right").astype(np.int64)
        numbers = np.empty(BLOCK, dtype=np.int64)
        for index, share in enumerate(self._shares.tolist()):
            numbers[sources == index] = block * share + np.arange(share)
        return sources, numbers
