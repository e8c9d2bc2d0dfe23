"""Ends a run whose evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class EarlyStop:
    """Counts the evaluations in a row that were no better than the best one.

    patience: the number of them after which the run ends. min_delta: an evaluation is better if its
    loss is lower by more than this.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        self._patience, self._min_delta = patience, min_delta
        self._best, self._best_step, self._num_worse = math.inf, 0, 0

    def saw(self, step: int, loss: float) -> None:
        """Takes the loss of an evaluation, which must be the same on all ranks."""
        if loss < self._best - self._min_delta:
            self._best, self._best_step, self._num_worse = loss, step, 0
        else:
            self._num_worse += 1

    @property
    def is_due(self) -> bool:
        """Whether the run must end."""
        return self._num_worse >= self._patience

    def describe(self) -> str:
        """Says why the run ends."""
        count = self._num_worse
        evaluations = "evaluation" if count == 1 else f"{count} evaluations"
        margin = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"stopped early: the last {evaluations} did not improve on {self._best:.4f}, the loss "
            f"after step {self._best_step:,}{margin}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns numbers for a checkpoint, in JSON."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "best_step": self._best_step, "num_worse": self._num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`. Raises ValueError for other values."""
        try:
            best, step, worse = state["best"], int(state["best_step"]), int(state["num_worse"])
            self._best = math.inf if best is None else float(best)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"expected the state of early stopping, got {state!r}") from None
        self._best_step, self._num_worse = step, worse
