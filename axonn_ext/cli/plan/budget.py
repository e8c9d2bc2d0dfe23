"""The cost of a whole training run: days, GPU-hours, money and energy."""

from __future__ import annotations

from typing import NamedTuple

from axonn_ext.planner.estimate import Estimate

_HOURS_PER_DAY, _SECONDS_PER_DAY = 24, 86400


class Budget(NamedTuple):
    """tokens: of the whole training run. price: of one GPU hour, in any currency. watts: of one GPU
    while it trains. None: not known."""

    tokens: float
    price: float | None = None
    watts: float | None = None

    def days(self, estimate: Estimate) -> float:
        return self.tokens / estimate.tokens_per_s / _SECONDS_PER_DAY

    def gpu_hours(self, estimate: Estimate) -> float:
        return self.days(estimate) * _HOURS_PER_DAY * estimate.job.grid.size

    def cost(self, estimate: Estimate) -> float | None:
        """Returns the price of all GPU-hours; None if the price is not known."""
        return None if self.price is None else self.price * self.gpu_hours(estimate)

    def energy_mwh(self, estimate: Estimate) -> float | None:
        """Returns the megawatt-hours of the GPUs; None if their power is not known."""
        return None if self.watts is None else self.watts * self.gpu_hours(estimate) / 1e6
