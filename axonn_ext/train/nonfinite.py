"""Handles a loss or a gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from axonn_ext.optim import LossScaler
from axonn_ext.optim.zero import shards_of
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import of_all_ranks
from axonn_ext.spec.files.errors import first_of
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.train.config import Config

MOST_IN_A_ROW = 10  # a run that skips more consecutive steps will not recover


class NonFinite:
    """Ends the run or skips the step, as `train.on_nonfinite` says, and names the gradients.

    say: shows a line to the user, on rank 0. scaler: for a run in fp16, whose gradients overflow
    now and then; such a step is always skipped, unless the scale cannot get any lower. grid: the
    ranks whose gradients are checked; None: only this rank.
    """

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        say: Callable[[str], None] | None,
        scaler: LossScaler | None = None,
        grid: Grid | None = None,
    ) -> None:
        self._config, self._module, self._say = config, module, say
        self._scaler, self._grid = scaler, grid
        self._in_a_row = 0
        self.num_skipped = 0

    def is_fine(self, step: int, loss: float, norm: float) -> bool:
        """Returns whether to use the step's gradients. All ranks pass the same numbers.

        Collectives, if a number is not finite: an all-gather of names along each axis. Raises
        TrainingError if the run must end.
        """
        advice = f"a lower optim.lr (now {self._config.optim.lr:g}), more optim.warmup_steps"
        if self._scaler is not None and math.isfinite(loss):
            scale, is_least = self._scaler.loss_scale, self._scaler.is_least
            if self._scaler.update(overflow=not math.isfinite(norm)):
                if not is_least:
                    self._tell_overflow(step, scale)
                    return False
                advice = (
                    f'a lower train.min_loss_scale (now {scale:g}), train.dtype = "bf16", {advice}'
                )
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return True
        names = self._names()
        found = f"step {step}: loss {loss}, gradient norm {norm}: "
        found += (
            f"not finite in the gradient of {first_of(names)}"
            if names
            else "every gradient is finite"
        )
        self._in_a_row += 1
        if self._config.train.on_nonfinite == "stop":
            raise TrainingError(f'{found}; try {advice}, or train.on_nonfinite = "skip"')
        if self._in_a_row > MOST_IN_A_ROW:
            raise TrainingError(f"{found}; the {MOST_IN_A_ROW} steps before it were skipped, too")
        self.num_skipped += 1
        if self._say is not None:
            self._say(f"skipped {found}")
        return False

    def _tell_overflow(self, step: int, scale: float) -> None:
        assert self._scaler is not None
        if self._say is not None:
            self._say(
                f"skipped step {step}: gradients overflowed fp16 with loss scale {scale:g}, which "
                f"is {self._scaler.loss_scale:g} now"
            )

    def _names(self) -> list[str]:
        """Returns the parameters whose gradient is not finite on some rank, in model order."""
        mine = {
            name: p.grad is not None and not bool(torch.isfinite(p.grad).all())
            for name, p in self._module.named_parameters()
        }
        mine |= dict.fromkeys(self._names_in_parts(), True)
        found = [name for name, is_found in mine.items() if is_found]
        if self._grid is None:
            return found
        for axis in COMMUNICATING:  # one by one, so that no rank holds the names of all ranks
            if self._grid.size(axis) == 1:
                continue
            of_axis = of_all_ranks(found, self._grid.group(axis))
            union = dict.fromkeys(name for names in of_axis for name in names)
            found = [*union] if axis == "pipe" else [name for name in mine if name in union]
        return found

    def _names_in_parts(self) -> list[str]:
        """Returns the parameters for which this rank's part of the sum (ZeRO) is not finite."""
        found = {id(s): s for p in self._module.parameters() if (s := shards_of(p)) is not None}
        return [
            p.name
            for shards in found.values()
            for p, gradient in shards.gradients()
            if not bool(torch.isfinite(gradient).all())
        ]
