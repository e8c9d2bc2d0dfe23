"""Compares the losses of two runs step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from axonn_ext.terminal.errors import UserError
from axonn_ext.train.metrics import read_metrics


@dataclass(frozen=True)
class Pair:
    """The losses of both runs at one step."""

    step: int
    tokens: int
    loss: float
    reference: float

    @property
    def difference(self) -> float:
        """|loss - reference| / |reference|; infinite if one of them is not a number."""
        if not (math.isfinite(self.loss) and math.isfinite(self.reference)):
            return math.inf
        if self.loss == self.reference:
            return 0.0
        return abs(self.loss - self.reference) / abs(self.reference or self.loss)


@dataclass(frozen=True)
class Comparison:
    """The losses at all steps and evaluations that two runs have in common."""

    name: str
    reference_name: str
    pairs: list[Pair]
    evaluations: list[Pair]
    num_steps: tuple[int, int]  # all steps of each run, which may be more than the common ones

    @property
    def worst(self) -> Pair:
        """The pair of training losses that are furthest apart."""
        return max(self.pairs, key=lambda pair: pair.difference)

    def some_pairs(self, count: int) -> list[Pair]:
        """Returns about `count` evenly spread pairs, including the first and the last one."""
        last = len(self.pairs) - 1
        places = {round(i * last / max(1, count - 1)) for i in range(count)}
        return [self.pairs[place] for place in sorted(places)]


def compare(folder: Path, reference: Path) -> Comparison:
    """Compares the run in `folder` with the one in `reference`.

    Raises: UserError if either has no metrics or they have no step in common.
    """
    run, other = read_metrics(folder), read_metrics(reference)
    expected = {m.step: m.loss for m in other.steps}
    expected_evaluations = {m.step: m.eval_loss for m in other.evaluations}
    pairs = [
        Pair(m.step, m.tokens, m.loss, expected[m.step]) for m in run.steps if m.step in expected
    ]
    evaluations = [
        Pair(m.step, m.tokens, m.eval_loss, expected_evaluations[m.step])
        for m in run.evaluations
        if m.step in expected_evaluations
    ]
    if not pairs:
        raise UserError(f"expected runs with common steps, but {folder} and {reference} have none")
    sizes = (len(run.steps), len(other.steps))
    return Comparison(folder.name, reference.name, pairs, evaluations, sizes)
