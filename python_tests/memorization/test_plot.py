"""The plot of an experiment, for one model and for several."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_ext.train.memorization.plot import plot_arms
from axonn_ext.train.memorization.results import ARMS, ArmResult, BucketResult


def arm(name: str, parameters: int, model: str) -> ArmResult:
    buckets = tuple(BucketResult(seen, 16, seen, 20.0, 10.0, 2.0) for seen in (0, 4, 9))
    return ArmResult(model, parameters, name, 50, ((0, 5.5), (50, 0.75)), buckets)


@pytest.mark.parametrize("parameters", [[934_000], [2_100_000_000, 934_000, 123_000]])
def test_the_picture_names_what_it_shows(tmp_path: Path, parameters: list[int]) -> None:
    arms = [arm(name, count, f"m{count}") for count in parameters for name in ARMS]
    path = tmp_path / "a.svg"
    plot_arms(arms, path, title="A title", subtitle="with more below")
    text = path.read_text()  # each text of the plot is also a comment
    for label in ("A title", "with more below", "times that a document is seen", "4", "9", "100%"):
        assert f"<!-- {label} -->" in text, label
    sizes = [f"<!-- {size} -->" in text for size in ("0.123 M", "0.934 M", "2.1 B")]
    assert sizes == [len(parameters) > 1] * 3
    assert ("<!-- repeated of those seen 9 times -->" in text) == (len(parameters) > 1)
    assert ("<!-- step -->" in text) == (len(parameters) == 1)
    assert ("<!-- 0.750 -->" in text) == (len(parameters) == 1)
    # The legend lists the smallest model first, regardless of the input order.
    if len(parameters) > 1:
        legend = [text.index(f"<!-- plain loss, {size} -->") for size in ("0.123 M", "2.1 B")]
        assert legend == sorted(legend)
