"""Norms over features that are split over y: a few numbers a row cross y, rows never do.

Statistics are in fp32 (fp64 for fp64). Weights [H / Gy]; their gradient is a sum over this rank's
rows, so `sync_gradients` sums it over every axis that splits them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_ext import collectives
from axonn_ext.grid import Grid
from axonn_ext.nn.sharded import (
    LAYOUTS,
    Init,
    ParameterSpec,
    ShardedModule,
    check_choice,
    initialize,
    rows_over,
)


class _Norm(ShardedModule):
    weight: nn.Parameter
    bias: nn.Parameter
    has_bias = False

    def __init__(
        self,
        features: int,
        *,
        grid: Grid,
        eps: float = 1e-5,
        layout: str = "sharded",
        algorithm: str = "auto",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(grid)
        check_choice("layout", layout, LAYOUTS)
        self.features, self.eps, self.layout, self.algorithm = features, eps, layout, algorithm
        summed_over = tuple(reversed(rows_over(layout, "x")))
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            if name == "bias" and not self.has_bias:
                continue
            spec = ParameterSpec((features,), {0: ("y",)}, summed_over, Init.constant(value))
            self.add_parameter(name, spec, dtype=dtype, device=device)
        if seed is not None:
            initialize(self, seed=seed)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}, layout={self.layout}"


def _statistics_dtype(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight.   x [m / Gx, H / Gy]   (replicated: [..., H / Gy])

    Collectives: an all-reduce over y of one number a row, in each direction.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = _statistics_dtype(x)
        squares = collectives.all_reduce(
            wide.square().sum(-1, keepdim=True), self.grid.axis("y"), algorithm=self.algorithm
        )
        rstd = torch.rsqrt(squares / self.features + self.eps)
        return (wide * rstd).to(x.dtype) * self.weight


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias.   x as in RMSNorm.

    Collectives: an all-gather over y of two numbers a row, a reduce-scatter back.
    Source: Chan et al. 1979, "Updating formulae": parts' means and squared deviations combine
    without the cancellation of E[x^2] - E[x]^2.
    """

    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        wide = _statistics_dtype(x)
        axis = self.grid.axis("y")
        part_mean = wide.mean(-1)
        part_square = (wide - part_mean.unsqueeze(-1)).square().sum(-1)
        parts = collectives.all_gather(
            torch.stack([part_mean, part_square]).unsqueeze(0), axis, algorithm=self.algorithm
        )  # [Gy, 2, rows]
        means, squares = parts[:, 0], parts[:, 1]
        mean = means.mean(0)
        deviations = (means - mean).square().sum(0) * x.shape[-1]
        variance = (squares.sum(0) + deviations) / self.features
        rstd = torch.rsqrt(variance + self.eps)
        normal = (wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
        return normal.to(x.dtype) * self.weight + self.bias
