"""Similarity measures of continuations against their definitions, and intervals of shares."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest

from axonn_ext.train.memorization.measures import edit_distance, longest_common_run, wilson

Z = 1.959964  # for 95 %, from tables


@pytest.mark.parametrize("count", [1, 2, 7, 20, 500])
def test_the_interval_has_the_shares_that_the_score_test_accepts(count) -> None:
    """Each end is Z standard errors away from the share, with the standard error at that end."""
    for matches in {0, 1, count // 2, count - 1, count}:
        low, high = wilson(matches, count)
        share = matches / count
        assert 0 <= low <= share <= high <= 1
        for end in (low, high):
            distance = Z * math.sqrt(end * (1 - end) / count)
            if 0 < end < 1:
                # Z has only seven digits.
                assert abs(end - share) == pytest.approx(distance, rel=1e-5)
        assert (low == 0) == (matches == 0)
        assert (high == 1) == (matches == count)


def test_published_intervals() -> None:
    """Brown, Cai and DasGupta (Stat. Sci. 16, 2001): 0 to 0.278 for no success in 10 trials."""
    assert wilson(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


@pytest.mark.parametrize("values", [(0, 0), (3, 2), (-1, 2)])
def test_shares_that_are_none(values) -> None:
    with pytest.raises(ValueError, match="expected 0 <= matches <= count"):
        wilson(*values)


def slow_distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    @functools.cache
    def rest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        changed = rest(i + 1, j + 1) + (a[i] != b[j])
        return min(changed, rest(i + 1, j) + 1, rest(i, j + 1) + 1)

    return rest(0, 0)


def slow_run(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pieces = {a[i:j] for i, j in itertools.combinations(range(len(a) + 1), 2)}
    others = {b[i:j] for i, j in itertools.combinations(range(len(b) + 1), 2)}
    return max(map(len, pieces & others), default=0)


def test_distances_and_runs_are_those_of_the_definitions() -> None:
    draw = random.Random(4)
    seen = set()
    for _ in range(300):
        a, b = (tuple(draw.randrange(3) for _ in range(draw.randrange(9))) for _ in range(2))
        assert edit_distance(a, b) == slow_distance(a, b), (a, b)
        assert longest_common_run(a, b) == slow_run(a, b), (a, b)
        seen.add((edit_distance(a, b), longest_common_run(a, b)))
    assert len(seen) > 15
    assert edit_distance(a, a) == 0
    assert longest_common_run(a, a) == len(a)
