"""AdamW's state, piece by piece, and the update of pieces on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from axonn_ext.spec.optimizer import ParameterGroup, group_of

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")  # of AdamW


@dataclass(eq=False)
class MasterPiece:
    """A run of a parameter's elements, in row-major order, that this rank updates.

    master       the updated tensor: the parameter itself, or an fp32 copy of these elements
    group        index of its group of parameters; -1: in none
    ema          average of the master, shaped like it, if one is kept
    """

    parameter: nn.Parameter
    start: int
    stop: int
    master: Tensor
    group: int = field(default=-1, kw_only=True)
    ema: Tensor | None = field(default=None, kw_only=True)

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that are kept for the piece, by name."""
        return self.own_state if self.ema is None else self.own_state | {"ema": self.ema}

    @property
    def own_state(self) -> dict[str, Tensor]:
        """The tensors that the optimizer's update needs, by name."""
        raise NotImplementedError


@dataclass(eq=False)
class Piece(MasterPiece):
    """A piece that AdamW updates.

    exp_avg, exp_avg_sq  the moments, shaped like the master
    step         the number of updates, in fp32
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @property
    def own_state(self) -> dict[str, Tensor]:
        tensors = (self.step, self.exp_avg, self.exp_avg_sq)
        return dict(zip(STATE_NAMES, tensors, strict=True))

    @property
    def kind(self) -> Kind:
        """The key of its options."""
        return self.group, self.parameter.dim() >= 2


Kind = tuple[int, bool]  # a piece's group, and whether it is of a matrix
Options = dict[str, Any]  # lr, betas, eps and weight_decay, as in torch.optim.AdamW


@torch.no_grad()
def update(
    pieces: Sequence[Piece], gradients: Sequence[Tensor], options: Mapping[Kind, Options]
) -> None:
    """Updates pieces by torch's fused AdamW, given gradients in the dtypes of their masters.

    options: by `Piece.kind`
    """
    for kind, chosen in options.items():
        taken = [(p, g) for p, g in zip(pieces, gradients, strict=True) if p.kind == kind]
        if taken:
            beta1, beta2 = chosen["betas"]
            adamw(
                [p.master for p, _ in taken], [g for _, g in taken], [p.exp_avg for p, _ in taken],
                [p.exp_avg_sq for p, _ in taken], [], [p.step for p, _ in taken], fused=True,
                amsgrad=False, beta1=beta1, beta2=beta2, lr=chosen["lr"],
                weight_decay=chosen["weight_decay"], eps=chosen["eps"], maximize=False,
            )  # fmt: skip


@torch.no_grad()
def update_on_host(
    updated: Sequence[tuple[Piece, Tensor, Tensor]], options: Mapping[Kind, Options], factor: float
) -> None:
    """Updates pieces in host memory, each given with its gradient and memory for its new weight.

    It takes one pass over memory, on all threads of the rank. Gradients and weights are flat,
    contiguous and in the parameters' dtype. Gradients are multiplied by the factor in the dtype of
    the masters. On x86-64 the results are bitwise those of `update`, except for the bits of NaNs.

    Raises ValueError or TypeError for tensors that do not fit each other.
    """
    for kind, chosen in options.items():
        taken = [each for each in updated if each[0].kind == kind]
        if not taken:
            continue
        steps = [piece.step for piece, _, _ in taken]
        torch._foreach_add_(steps, 1)
        torch.ops.axonn._adamw_(
            [gradient for _, gradient, _ in taken], [piece.master for piece, _, _ in taken],
            [piece.exp_avg for piece, _, _ in taken], [piece.exp_avg_sq for piece, _, _ in taken],
            [weight for _, _, weight in taken], steps, chosen["lr"], *chosen["betas"],
            chosen["eps"], chosen["weight_decay"], factor,
        )  # fmt: skip


def freeze(module: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Makes the parameters of frozen groups not require gradients."""
    for name, parameter in module.named_parameters() if groups else ():
        number = group_of(name, groups)
        if number >= 0 and groups[number].frozen:
            parameter.requires_grad_(False)


def groups_of(module: nn.Module | None, groups: Sequence[ParameterGroup]) -> dict[int, int]:
    """Returns the index of the group of each parameter, by its id.

    Raises ValueError for groups without a module.
    """
    if not groups:
        return {}
    if module is None:
        raise ValueError("AdamW: groups need a module, which has names, got only parameters")
    return {id(p): group_of(name, groups) for name, p in module.named_parameters()}
