"""Similarity of two continuations, and the confidence interval of a share of documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959963984540054  # 95 % of a normal distribution lies within this many standard deviations


def wilson(matches: int, count: int) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval of the share matches / count.

    It stays within [0, 1] and is meaningful for shares of 0 and 1 and for few documents. Raises
    ValueError unless 0 <= matches <= count and count >= 1.

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927) 209.
    """
    if count < 1 or not 0 <= matches <= count:
        raise ValueError(f"expected 0 <= matches <= count and count >= 1, got {matches} of {count}")
    share, z2 = matches / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    reach = _Z * spread / (1 + z2 / count)
    # At the ends the formula gives exactly 0 and 1, up to rounding.
    low = 0.0 if matches == 0 else middle - reach
    high = 1.0 if matches == count else middle + reach
    return low, high


def edit_distance(found: Sequence[int], want: Sequence[int]) -> int:
    """Returns the minimum number of token insertions, deletions and replacements between the two.

    Source: Levenshtein, Sov. Phys. Dokl. 10 (1966) 707; Wagner and Fischer, J. ACM 21 (1974) 168.
    """
    above = list(range(len(want) + 1))
    for row, mine in enumerate(found, start=1):
        here = [row]
        for column, theirs in enumerate(want, start=1):
            replaced = above[column - 1] + (mine != theirs)
            here.append(min(replaced, above[column] + 1, here[-1] + 1))
        above = here
    return above[-1]


def longest_common_run(found: Sequence[int], want: Sequence[int]) -> int:
    """Returns the length of the longest run of tokens in both, at any position."""
    longest = 0
    above = [0] * (len(want) + 1)  # lengths of the runs that end at the previous token, by place
    for mine in found:
        here = [0]
        for column, theirs in enumerate(want):
            here.append(above[column] + 1 if mine == theirs else 0)
        longest = max(longest, *here)
        above = here
    return longest
