"""The matrices that Muon updates: this rank's blocks, their momentum, and the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.optim.newton_schulz import Mesh, orthogonalised
from axonn_ext.optim.pieces import MasterPiece, Options

MATRIX_STATE = ("momentum_buffer",)  # the names of Muon's tensors


@dataclass(eq=False)
class MatrixPiece(MasterPiece):
    """This rank's whole block of a matrix, and its momentum, shaped like the master.

    sizes: of the whole matrix. options: lr, momentum, nesterov, adjust_lr and weight_decay, shared
    by the matrices of a group.
    """

    momentum_buffer: Tensor
    sizes: tuple[int, ...]
    mesh: Mesh
    options: Options

    @classmethod
    @torch.no_grad()
    def of(
        cls, p: ShardedParameter, options: Options, *, algorithm: str, apart: bool
    ) -> MatrixPiece:
        """Returns a block without momentum. apart: its master is a copy even if it is fp32."""
        master: Tensor = p.parameter
        dtype = torch.promote_types(master.dtype, torch.float32)
        if apart or master.dtype != dtype:
            master = master.detach().to(dtype, copy=True)
        buffer = torch.zeros_like(master, requires_grad=False)
        sizes = p.spec.full_sizes
        mesh = Mesh.of(p.grid, sizes, p.spec.dims, algorithm=algorithm)
        return cls(p.parameter, 0, p.parameter.numel(), master, buffer, sizes, mesh, options)

    @property
    def own_state(self) -> dict[str, Tensor]:
        return dict(zip(MATRIX_STATE, (self.momentum_buffer,), strict=True))

    def add(self, gradient: Tensor, factor: float) -> Tensor:
        """Adds a gradient of the block to the momentum; returns it, widened and scaled."""
        wide = gradient.view_as(self.master).to(self.master.dtype)
        if factor != 1:
            wide.mul_(factor)
        self.momentum_buffer.lerp_(wide, 1 - self.options["momentum"])
        return wide

    def update(self, gradient: Tensor) -> Tensor:
        """Returns the block's update in bf16, given the gradient as `add` returned it.

        Collectives: those of `newton_schulz.orthogonalised`.
        """
        moved = self.momentum_buffer
        if self.options["nesterov"]:
            moved = gradient.lerp(moved, self.options["momentum"])
        return orthogonalised(moved.to(torch.bfloat16), self.mesh)

    def apply(self, update: Tensor) -> None:
        """Changes master and parameter as torch.optim.Muon does."""
        options = self.options
        self.master.mul_(1 - options["lr"] * options["weight_decay"])
        rate = options["lr"] * adjustment(options["adjust_lr"], self.sizes)
        self.master.add_(update, alpha=-rate)
        self.copy_back()

    def copy_back(self) -> None:
        """Sets the parameter to the master."""
        if self.master is not self.parameter:
            self.parameter.copy_(self.master)


def adjustment(kind: str, sizes: Sequence[int]) -> float:
    """Returns the factor of the learning rate of a matrix [N, K]; see `Muon`."""
    n, k = sizes
    return 0.2 * math.sqrt(max(n, k)) if kind == "match_rms_adamw" else math.sqrt(max(1, n / k))


def chosen_matrices(module: nn.Module, matrices: Iterable[nn.Parameter]) -> list[ShardedParameter]:
    """Returns the matrices that are trained, in the module's order."""
    wanted = {id(parameter): parameter for parameter in matrices}
    found = [p for p in sharded_parameters(module) if id(p.parameter) in wanted]
    for p in found:
        if p.parameter.dim() != 2:
            raise ValueError(
                f"Muon: matrices must have two dimensions, got {p.name} with shape "
                f"{list(p.spec.full_sizes)}"
            )
    if len(found) < len(wanted):
        own = {id(p.parameter) for p in found}
        shapes = [list(p.shape) for i, p in wanted.items() if i not in own]
        raise ValueError(
            f"Muon: matrices must be parameters of the module, got {len(shapes)} others, one of "
            f"shape {shapes[0]}"
        )
    return [p for p in found if p.parameter.requires_grad]
