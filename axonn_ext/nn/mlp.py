"""The feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.nn.linear import Linear
from axonn_ext.nn.sharded import Init
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import check_choice

GATED = ("swiglu", "geglu")


class MLP(nn.Module):
    """The feed-forward part of a block: an expand Linear, an activation, a contract Linear.

    down(activation(up(x))), x [m / Gx, H / Gy] -> same (replicated: [..., H / Gy]).

    With activation "gelu" (tanh form), "gelu_erf" (exact) or "relu", the whole weight of `up` is
    [F, H]. With "swiglu", which computes silu(gate) * up, or "geglu", gelu(gate) * up, it is
    [2F, H], and its rows alternate gate, up, gate, up, ..., so that each block of rows holds whole
    pairs.

    bias: of up and, unless out_bias is given, of down. held: the weights of up and down, as Linear
    takes them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        grid: Grid,
        activation: str = "gelu",
        bias: bool = True,
        out_bias: bool | None = None,
        layout: str = "sharded",
        init: Init | None = None,
        out_init: Init | None = None,
        save_gathered: bool = False,
        reshard_after_forward: bool = True,
        algorithm: str = "auto",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ("gelu", "gelu_erf", "relu", *GATED))
        self.activation = activation
        width = intermediate_size * (2 if activation in GATED else 1)
        if intermediate_size % grid.size("x"):
            raise ValueError(
                f"MLP: intermediate_size={intermediate_size} must be divisible by "
                f"x={grid.size('x')}"
            )
        linear = partial(
            Linear, grid=grid, layout=layout, save_gathered=save_gathered,
            reshard_after_forward=reshard_after_forward, algorithm=algorithm, seed=seed,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.up = linear(hidden_size, width, role="expand", init=init, bias=bias, name="up")
        self.down = linear(
            intermediate_size, hidden_size, role="contract", init=out_init or init,
            bias=bias if out_bias is None else out_bias, name="down",
        )  # fmt: skip

    def forward(self, x: Tensor, held: Sequence[Tensor | None] = (None, None)) -> Tensor:
        hidden = self.up(x, held=held[0])
        return self.down(self._activated(hidden), held=held[1])

    def _activated(self, hidden: Tensor) -> Tensor:
        if self.activation in ("gelu", "gelu_erf"):
            form = "tanh" if self.activation == "gelu" else "none"
            return F.gelu(hidden, approximate=form)
        if self.activation == "relu":
            return F.relu(hidden)
        gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
        gate = F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        return gate * up
