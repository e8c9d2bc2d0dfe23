"""The factor by which a loss is multiplied before backward, so that fp16 can hold its gradients."""

from __future__ import annotations

import math
from typing import Any

_STATE = ("loss_scale", "clean_steps", "num_overflows")


class LossScaler:
    """A loss scale that falls when gradients overflow fp16, and rises while they do not.

        scaler = LossScaler()
        for step in ...:
            (model.loss(...) * scaler.loss_scale).backward()
            sync_gradients(model)
            found = gradient_norm(model, max_norm=1.0, loss_scale=scaler.loss_scale)
            if not scaler.update(overflow=not found.norm.isfinite()):
                optimizer.step(gradient_factor=float(found.factor))

    fp16 has no numbers below 6e-8, so small gradients would be zero. After a step whose gradients
    overflow, the scale is halved and the step must be skipped; after `loss_scale_window` steps in a
    row without overflow it is doubled. With powers of two, scaling rounds no gradient that fp16
    holds in full precision. Ranks that call `update` with equal values have equal scales: the norm
    of `gradient_norm` is equal on all ranks.

    initial_loss_scale: the scale of the first step. min_loss_scale, max_loss_scale: its bounds.
    loss_scale_window: steps. This issues no collectives.

    Raises ValueError for scales that are not positive numbers in this order, or a window below 1.
    Source: Micikevicius et al., arXiv:1710.03740, section 3.2; torch.amp.GradScaler.
    """

    def __init__(
        self,
        *,
        initial_loss_scale: float = 2.0**16,
        min_loss_scale: float = 2.0**10,
        max_loss_scale: float = 2.0**24,
        loss_scale_window: int = 200,
    ) -> None:
        if not (0 < min_loss_scale <= initial_loss_scale <= max_loss_scale < math.inf):
            raise ValueError(
                "initial_loss_scale: expected 0 < min_loss_scale <= initial_loss_scale <= "
                f"max_loss_scale, all finite, got {min_loss_scale:g}, {initial_loss_scale:g} and "
                f"{max_loss_scale:g}"
            )
        if loss_scale_window < 1:
            raise ValueError(f"loss_scale_window: expected at least 1, got {loss_scale_window}")
        self._scale = float(initial_loss_scale)
        self._min, self._max = float(min_loss_scale), float(max_loss_scale)
        self._window = loss_scale_window
        self._clean_steps = 0  # in a row, since the scale was last changed
        self._num_overflows = 0

    @property
    def loss_scale(self) -> float:
        """The factor for the loss of the next step."""
        return self._scale

    @property
    def is_least(self) -> bool:
        """Whether the scale is at its minimum and cannot fall any more."""
        return self._scale <= self._min

    @property
    def num_overflows(self) -> int:
        """Number of steps that overflowed, including those before a resumed state."""
        return self._num_overflows

    def update(self, overflow: bool) -> bool:
        """Records a step; returns `overflow`, that is, whether the step must be skipped."""
        if overflow:
            self._num_overflows += 1
            self._clean_steps = 0
            self._scale = max(self._scale / 2, self._min)
            return True
        self._clean_steps += 1
        if self._clean_steps == self._window:
            self._clean_steps = 0
            self._scale = min(self._scale * 2, self._max)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and the counts that decide when it changes, as JSON numbers."""
        values = (self._scale, self._clean_steps, self._num_overflows)
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`. A scale beyond this scaler's bounds is clamped.

        Raises ValueError, before anything is changed, for an invalid state.
        """
        is_state = isinstance(state, dict)
        found: list[Any] = [state.get(key) if is_state else None for key in _STATE]
        scale, clean_steps, num_overflows = found
        is_scale = isinstance(scale, int | float) and 0 < scale < math.inf
        if not is_scale or not all(isinstance(n, int) and n >= 0 for n in found[1:]):
            raise ValueError(
                "LossScaler.load_state_dict: expected a positive number and two counts as "
                f"{', '.join(_STATE)}, got {state}"
            )
        self._scale = min(max(float(scale), self._min), self._max)
        # A run that resumes with a shorter window may already have passed its end.
        self._clean_steps = min(clean_steps, self._window - 1)
        self._num_overflows = num_overflows
