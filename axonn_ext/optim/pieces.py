"""What AdamW keeps, piece by piece, and the update of pieces by torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw


@dataclass(eq=False)
class Piece:
    """A run of a parameter's elements, in row-major order, that this rank updates.

    master       what is updated: the parameter itself, or a copy of these elements in fp32
    exp_avg, exp_avg_sq  the moments, shaped like the master
    step         how often it was updated, a number in fp32
    """

    parameter: nn.Parameter
    start: int
    stop: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that AdamW keeps, by their names."""
        return {"step": self.step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices alone."""
        return self.parameter.dim() >= 2

    def slice(self, start: int, stop: int) -> Piece:
        """Returns elements of a flat piece as one that shares their memory, and the step."""
        return Piece(
            self.parameter, self.start + start, self.start + stop, self.master[start:stop],
            self.exp_avg[start:stop], self.exp_avg_sq[start:stop], self.step,
        )  # fmt: skip


# Masters, gradients, moments, none for amsgrad, and steps.
_List = list[Tensor]
_Tensors = tuple[_List, _List, _List, _List, _List, _List]
Options = dict[str, Any]  # lr, betas, eps and weight_decay, as torch.optim.AdamW names them


@torch.no_grad()
def update(
    pieces: Sequence[Piece], gradients: Sequence[Tensor], options: Mapping[bool, Options]
) -> None:
    """Updates pieces, given gradients of the dtypes of their masters.

    options: of the pieces that decay (True) and of the others (False)
    """
    for tensors, numbers in _arguments(pieces, gradients, options):
        adamw(*tensors, fused=True, **numbers)


def update_block(
    pieces: Sequence[Piece], gradients: Sequence[Tensor], options: Mapping[bool, Options]
) -> None:
    """Updates pieces of one dtype and device, whose steps already count this update.

    It calls the kernel of torch's fused AdamW as `update` does, and so gives the same bits. But it
    leaves the steps alone, which the blocks of a piece share, and it does not sort the pieces by
    device and dtype, which would add to the cost of each block.
    """
    for tensors, numbers in _arguments(pieces, gradients, options):
        torch._fused_adamw_(*tensors, **numbers)


def _arguments(
    pieces: Sequence[Piece], gradients: Sequence[Tensor], options: Mapping[bool, Options]
) -> Iterator[tuple[_Tensors, dict[str, Any]]]:
    """Yields what torch's AdamW takes, once for each group of options that has pieces."""
    for decays, chosen in options.items():
        taken = [(p, g) for p, g in zip(pieces, gradients, strict=True) if p.decays == decays]
        if taken:
            beta1, beta2 = chosen["betas"]
            tensors = (
                [p.master for p, _ in taken], [g for _, g in taken], [p.exp_avg for p, _ in taken],
                [p.exp_avg_sq for p, _ in taken], list[Tensor](), [p.step for p, _ in taken],
            )  # fmt: skip
            yield tensors, {
                "amsgrad": False, "beta1": beta1, "beta2": beta2, "lr": chosen["lr"],
                "weight_decay": chosen["weight_decay"], "eps": chosen["eps"], "maximize": False,
            }  # fmt: skip
