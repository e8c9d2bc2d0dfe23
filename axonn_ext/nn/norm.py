"""Norms over features that are split over y. They communicate only a few numbers per row over y.

Statistics are computed in fp32 (fp64 for fp64). Weights are [H / Gy]. Backward sums their gradient
over this rank's rows only, and `sync_gradients` sums it over every axis that splits the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.nn.sharded import Init, ParameterSpec, ShardedModule, initialize, rows_over
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import LAYOUTS, check_choice


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
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            if name == "weight" or self.has_bias:
                self.add_parameter(name, self._spec(value), dtype=dtype, device=device)
        if seed is not None:
            initialize(self, seed=seed)

    def _spec(self, value: float) -> ParameterSpec:
        """Returns the spec of a parameter with a constant initial value."""
        summed_over = tuple(reversed(rows_over(self.layout, "x")))
        return ParameterSpec((self.features,), {0: ("y",)}, summed_over, Init.constant(value))

    def _check_input(self, x: Tensor) -> None:
        name, features = type(self).__name__, self.weight.shape[0]
        check_tensor(name, "input", x, self.weight.device)
        if x.dim() == 0 or x.shape[-1] != features:
            raise ValueError(
                f"{name}: input must have shape [..., {features}] on each rank "
                f"(features={self.features}, {self.grid.shape}), got {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}, layout={self.layout}"


class RMSNorm(_Norm):
    """RMSNorm over features that are split over y.

        x / sqrt(mean(x^2) + eps) * weight      x [m / Gx, H / Gy]   (replicated: [..., H / Gy])

    Collectives: an all-reduce over y of one number per row, in forward and in backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        axis = self.grid.axis("y")
        collectives.refuse_transforms("RMSNorm")
        algorithm = collectives.algorithm_of_collective(self.algorithm, x)
        return _Normalize.apply(
            x, self.weight, None, self.features, self.eps, axis.name, axis.size, algorithm
        )


class LayerNorm(_Norm):
    """LayerNorm over features that are split over y.

        (x - mean) / sqrt(var + eps) * weight + bias      x as in RMSNorm

    Collectives: an all-gather over y of two numbers per row in forward, and an all-reduce over y of
    two numbers per row in backward.
    """

    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        axis = self.grid.axis("y")
        if axis.size == 1:
            return F.layer_norm(x, (self.features,), self.weight, self.bias, self.eps)
        collectives.refuse_transforms("LayerNorm")
        algorithm = collectives.algorithm_of_collective(self.algorithm, x)
        return _Normalize.apply(
            x, self.weight, self.bias, self.features, self.eps, axis.name, axis.size, algorithm
        )


class HeadNorm(_Norm):
    """RMSNorm over the D features of each head, x [..., D].

    All heads have one weight [D], which every rank holds whole. The module issues no collectives;
    `sync_gradients` sums the gradient over the axes that split heads and rows.
    """

    def _spec(self, value: float) -> ParameterSpec:
        # In `replicated` all y ranks compute the same.
        summed_over = ("x", "y", "z", "data") if self.layout == "sharded" else ("x", "z", "data")
        return ParameterSpec((self.features,), {}, summed_over, Init.constant(value))

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        collectives.refuse_transforms("HeadNorm")
        return _Normalize.apply(x, self.weight, None, self.features, self.eps, "", 1, "auto")


class _Normalize(torch.autograd.Function):
    """LayerNorm, or RMSNorm if there is no bias, as one node of the autograd graph.

    Autograd of the formula would pass over the rows four times as often, and save four tensors of
    their size for backward instead of one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        features: int,
        eps: float,
        name: str,
        size: int,
        algorithm: str,
    ) -> Tensor:
        axis = (name, size, algorithm)
        wide = _wide(x)
        if bias is None:
            squares = _all_reduce(wide.square().sum(-1, keepdim=True), *axis)
            rstd = torch.rsqrt(squares / features + eps)
            normal = wide * rstd
        else:
            mean, rstd = _moments(wide, features, eps, *axis)
            normal = (wide - mean).mul_(rstd)
        normal = normal.to(x.dtype)
        ctx.save_for_backward(normal, rstd, weight)
        ctx.features, ctx.axis, ctx.has_bias = features, axis, bias is not None
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Computes dx = (g - mean(g) - normal * mean(g * normal)) * rstd, where g = dy * weight.

        RMSNorm has no mean(g) term. Means are over all features.
        """
        normal, rstd, weight = ctx.saved_tensors
        dtype, wide, wide_weight = dy.dtype, _wide(dy), _wide(weight)
        product = wide * normal
        sums = [product @ wide_weight]
        if ctx.has_bias:
            sums.append(wide @ wide_weight)
        means = _all_reduce(torch.stack(sums), *ctx.axis).unsqueeze(-1) / ctx.features
        dx = wide * wide_weight
        if ctx.has_bias:
            dx.sub_(means[1])
        dx.sub_(normal * means[0]).mul_(rstd)
        dweight = product.flatten(0, -2).sum(0).to(dtype)
        dbias = wide.flatten(0, -2).sum(0).to(dtype) if ctx.has_bias else None
        return dx.to(dtype), dweight, dbias, None, None, None, None, None


def _moments(
    x: Tensor, features: int, eps: float, name: str, size: int, algorithm: str
) -> tuple[Tensor, Tensor]:
    """Returns (mean, 1 / sqrt(var + eps)) of whole rows, [..., 1] each.

    The means and squared deviations of the parts are combined as in Chan et al. 1979, "Updating
    formulae", which avoids the cancellation of E[x^2] - E[x]^2.
    """
    part_mean = x.mean(-1, keepdim=True)
    part_square = (x - part_mean).square_().sum(-1, keepdim=True)
    own = torch.stack([part_mean, part_square]).unsqueeze(0)
    parts = torch.ops.axonn.all_gather(own, 0, name, size, algorithm)  # [Gy, 2, ..., 1]
    means, squares = parts[:, 0], parts[:, 1]
    mean = means.mean(0)
    deviations = (means - mean).square().sum(0) * x.shape[-1]
    return mean, torch.rsqrt((squares.sum(0) + deviations) / features + eps)


def _all_reduce(value: Tensor, name: str, size: int, algorithm: str) -> Tensor:
    if size == 1:
        return value
    return torch.ops.axonn.all_reduce(value, "sum", name, size, algorithm)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
