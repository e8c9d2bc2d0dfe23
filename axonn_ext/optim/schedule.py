"""The learning rate as a pure function of the step, so that a resumed run needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """A learning rate that rises linearly to `peak`, then falls along half a cosine to `final`.

    Source: Loshchilov and Hutter, SGDR, equation 5 (https://arxiv.org/abs/1608.03983).
    """

    peak: float
    final: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.final + (self.peak - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
