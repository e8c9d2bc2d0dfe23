"""The plot and the table of `axonn-ext compare` are complete, and nothing overlaps."""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Callable

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from axonn_ext.cli.compare import print_table
from axonn_ext.train.compare import Comparison, Pair
from axonn_ext.train.plot import draw_comparison


def comparison_of(num_steps: int, difference: Callable[[int], float]) -> Comparison:
    pairs = []
    for step in range(1, num_steps + 1):
        loss = 2 + 3 * math.exp(-step / 100)
        pairs.append(Pair(step, 1024 * step, loss * (1 + difference(step)), loss))
    return Comparison("a-run", "reference", pairs, pairs[-1:], (num_steps, num_steps))


draw = random.Random(1)
COMPARISONS = {
    "tiny": comparison_of(300, lambda i: 10 ** draw.uniform(-12, -10)),
    "wide": comparison_of(300, lambda i: 10 ** (-12 + 11 * i / 300)),
    "large": comparison_of(300, lambda i: 10 ** draw.uniform(-1.5, -0.7)),
    "within a decade": comparison_of(300, lambda i: draw.uniform(1.1e-7, 1.9e-7)),
    "equal": comparison_of(300, lambda i: 0.0),
    "equal but one": comparison_of(300, lambda i: 3e-8 if i == 150 else 0.0),
    "one step": comparison_of(1, lambda i: 1e-9),
    "one equal step": comparison_of(1, lambda i: 0.0),
    "long": comparison_of(5000, lambda i: 10 ** draw.uniform(-9, -6)),
    "no number": comparison_of(30, lambda i: math.nan if i > 20 else 1e-3 * i),
}


def drawn(comparison: Comparison) -> Figure:
    figure = draw_comparison(comparison, subtitle="largest relative difference: 1e-9")
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("name", list(COMPARISONS))
def test_nothing_in_the_picture_overlaps_or_is_cut(name: str) -> None:
    figure = drawn(COMPARISONS[name])
    upper, lower = figure.axes
    texts = [*figure.texts, *lower.texts, upper.yaxis.get_offset_text(), lower.xaxis.label]
    for axis in (upper.yaxis, lower.yaxis, lower.xaxis):
        low, high = axis.get_view_interval()
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        texts += [axis.label, *(t.label1 for t in ticks if low <= t.get_loc() <= high)]
    boxes = {text.get_text(): text.get_window_extent() for text in texts if text.get_text()}
    assert "relative\ndifference" in boxes
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one, other)
    assert upper.get_xlim() == lower.get_xlim()


def test_differences_of_zero_are_told_in_words() -> None:
    for name, said in (
        ("equal", ["equal: 300 of 300 steps"]),
        ("equal but one", ["equal: 299 of 300 steps"]),
        ("tiny", []),
    ):
        lower = drawn(COMPARISONS[name]).axes[1]
        assert [text.get_text() for text in lower.texts] == said
        assert (lower.get_yticks().size > 0) == (name != "equal")


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 120])
def test_no_number_of_the_table_is_cut(columns: int) -> None:
    comparison = COMPARISONS["long"]
    file = io.StringIO()
    print_table(Console(file=file, width=columns), comparison)
    lines = file.getvalue().splitlines()
    for pair in comparison.some_pairs(10):
        numbers = [str(pair.step), f"{pair.loss:.6f}", f"{pair.reference:.6f}"]
        assert [*numbers, f"{pair.difference:.1e}"] in [line.split() for line in lines]
    assert "\N{HORIZONTAL ELLIPSIS}" not in file.getvalue()
    if columns >= 40:
        assert max(map(len, lines)) <= columns
