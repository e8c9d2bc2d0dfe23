"""Permutations of [0, n) that are computed place by place, from a seed, without a table.

docs/data.md specifies this function, so that others can compute it: always change both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_ROUNDS = 8
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, as in SplitMix64
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64's last step
# The second word of a key; distinguishes uses of one seed.
DOCUMENTS, MIXTURE, EXAMPLES, SEQUENCES, STREAM = 1, 2, 3, 4, 5


class Permutation:
    """A permutation of [0, size), determined by the size and the words of its key.

    A Feistel network of 8 rounds over pairs (high, low) with a * b >= size values, where a is the
    square root of the size, rounded up, and b is as small as possible. A value outside of [0, size)
    goes through the network again ("cycle walking"; fewer than a values do).
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 4.

    size: 1 to 2**62. key: whole numbers >= 0, below 2**64.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"size must be from 1 to 2**62, got {size}")
        self._size = size
        self._high = math.isqrt(size - 1) + 1
        self._low = -(-size // self._high)
        state = 0
        for word in key:
            state = _mix(state + word + _GOLDEN)
        self._keys = [_mix(state + (number + 1) * _GOLDEN) for number in range(NUM_ROUNDS)]

    def apply(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where the permutation sends each of the places, which lie in [0, size)."""
        values = self._network(places.astype(np.uint64))
        outside = np.flatnonzero(values >= self._size)
        while len(outside):
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self._size]
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = np.divmod(values, np.uint64(self._low))
        for number, key in enumerate(self._keys):
            if number % 2:
                low = _add(low, _drawn(high, key, self._low), self._low)
            else:
                high = _add(high, _drawn(low, key, self._high), self._high)
        return high * np.uint64(self._low) + low


def _mix(word: int) -> int:
    """Returns the last step of SplitMix64 (Steele, Lea and Flood 2014) for a 64-bit word."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FACTORS[0]) & _MASK
    word = ((word ^ (word >> 27)) * _FACTORS[1]) & _MASK
    return word ^ (word >> 31)


def _drawn(values: NDArray[np.uint64], key: int, below: int) -> NDArray[np.uint64]:
    """Returns a number in [0, below) for each value: the upper half of its mix, times `below`."""
    words = values + np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FACTORS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(_FACTORS[1])
    words ^= words >> np.uint64(31)
    return ((words >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32)


def _add(values: NDArray[np.uint64], drawn: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Returns the sums modulo `size` of numbers below it."""
    sums = values + drawn
    return np.where(sums >= size, sums - np.uint64(size), sums)
