"""The learning rate as a pure function of the step, so that a resumed run needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_ext.spec.optimizer import DECAY_TYPES, SCHEDULES


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises linearly to `peak` in `warmup_steps`, then follows a shape.

    shape: "constant" stays at the peak. "linear" and "cosine" fall from there to `final`, which the
    last step has, on a line or along half a cosine. "wsd" (warm-up, stable, decay) stays at the
    peak and falls to `final` in the last `decay_steps`, on a line or, with decay_type "1-sqrt", as
    1 - sqrt(progress). A warm-up that would overlap the decay delays it.

    Sources: Loshchilov and Hutter, SGDR, equation 5 (https://arxiv.org/abs/1608.03983); Haegele et
    al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, section 3
    (https://arxiv.org/abs/2405.18392).

    Raises ValueError for an unknown shape or decay_type.
    """

    peak: float
    final: float
    warmup_steps: int
    total_steps: int
    shape: str = "cosine"
    decay_steps: int = 0
    decay_type: str = "linear"

    def __post_init__(self) -> None:
        for name, known in (("shape", SCHEDULES), ("decay_type", DECAY_TYPES)):
            if (got := getattr(self, name)) not in known:
                raise ValueError(f"Schedule: {name} must be one of {', '.join(known)}, got {got!r}")

    def __call__(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        begin = self.warmup_steps
        if self.shape == "wsd":
            begin = max(begin, self.total_steps - 1 - self.decay_steps)
        span = max(1, self.total_steps - 1 - begin)
        progress = min(1.0, max(0, step - begin) / span)
        return self.final + (self.peak - self.final) * self._left(progress)

    def _left(self, progress: float) -> float:
        """Returns the part of the way from the peak to the final rate that is left."""
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if self.shape == "wsd" and self.decay_type == "1-sqrt":
            return 1 - math.sqrt(progress)
        return 1 - progress
