"""AdamW over a module's parameters, with fp32 master weights where those are of lower precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class AdamW:
    """torch.optim.AdamW (fused) that updates fp32 copies of parameters of lower precision.

    A bf16 weight has 8 bits of mantissa, so an update of less than 1/256 of it would be lost; an
    fp16 one has 11. Therefore fp32 copies are updated and then cast. Weight decay applies to
    matrices only, not to biases and norm weights. The update is elementwise, so shards need no
    communication.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._masters = [_master(p) for p in self._parameters]
        self._master_of = dict(zip(map(id, self._parameters), self._masters, strict=True))
        pairs = [(p, m) for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        self._low_precision: list[Tensor] = [p for p, _ in pairs]
        self._low_precision_masters: list[Tensor] = [m for _, m in pairs]
        groups = [
            {"params": [m for m in self._masters if m.ndim >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self._masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr, betas=betas, eps=eps, fused=True,
        )  # fmt: skip

    @property
    def torch_optimizer(self) -> torch.optim.AdamW:
        """The optimizer of torch that updates the masters and has their moments."""
        return self._adamw

    def master_of(self, parameter: nn.Parameter) -> Tensor:
        """Returns what is updated for a parameter: its fp32 copy, or else the parameter itself."""
        return self._master_of.get(id(parameter), parameter)

    def step(self, lr: float | None = None, *, gradient_factor: float = 1.0) -> None:
        """Applies the gradients; `lr` replaces the learning rate from this step on.

        gradient_factor: what the gradients are multiplied by first, such as `gradient_norm`'s to
        clip and unscale them. Gradients of lower precision are multiplied in fp32, since fp16 could
        not hold the products; those of parameters in fp32 and fp64 are multiplied in place.
        """
        if lr is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        if gradient_factor != 1 and gradients:
            torch._foreach_mul_(gradients, gradient_factor)
        self._adamw.step()
        if self._low_precision:
            with torch.no_grad():
                torch._foreach_copy_(self._low_precision, self._low_precision_masters)
            for master in self._low_precision_masters:
                master.grad = None

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns moments, step counts and those master weights that are copies of parameters."""
        return {
            "adamw": self._adamw.state_dict(),
            "masters": [master.detach().clone() for master in self._low_precision_masters],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned for the same parameters.

        Raises: ValueError if the master weights do not fit these parameters.
        """
        masters = state["masters"]
        shapes = [tuple(m.shape) for m in self._low_precision_masters]
        if [tuple(m.shape) for m in masters] != shapes:
            raise ValueError(
                f"AdamW.load_state_dict: expected {len(shapes)} master weights of these "
                f"parameters' shapes, got {len(masters)} that differ"
            )
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for master, saved in zip(self._low_precision_masters, masters, strict=True):
                master.copy_(saved)


def _master(parameter: nn.Parameter) -> Tensor:
    """Returns the tensor that AdamW updates: the parameter itself, or an fp32 copy of it."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().clone().requires_grad_()
