"""Norms over features that are split over y. They communicate only a few numbers per row over y.

Statistics are computed in fp32 (fp64 for fp64). Weights are [H / Gy]. Backward sums their gradient
over this rank's rows only, and `sync_gradients` sums it over every axis that splits the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.nn.sharded import Init, ParameterSpec, ShardedModule, initialize, rows_over
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import LAYOUTS, check_choice

# An axis that splits the features: its group, its size and the algorithm of its collectives.
_Axis = tuple[str, int, str]


class _Norm(ShardedModule):
    weight: nn.Parameter
    bias: nn.Parameter | None
    has_bias = False
    plus_one = False  # whether rows are multiplied by 1 + weight
    split_over: tuple[str, ...] = ("y",)  # the axes that split the features

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
        first = 0.0 if self.plus_one else 1.0
        self.add_parameter("weight", self._spec(first), dtype=dtype, device=device)
        if self.has_bias:
            self.add_parameter("bias", self._spec(0.0), dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)
        if seed is not None:
            initialize(self, seed=seed)

    def _spec(self, value: float) -> ParameterSpec:
        """Returns the spec of a parameter with a constant initial value."""
        summed_over = tuple(reversed(rows_over(self.layout, "x")))
        dims = {0: self.split_over}
        return ParameterSpec((self.features,), dims, summed_over, Init.constant(value))

    def _check_input(self, x: Tensor) -> None:
        name, features = type(self).__name__, self.weight.shape[0]
        check_tensor(name, "input", x, self.weight.device)
        if x.dim() == 0 or x.shape[-1] != features:
            raise ValueError(
                f"{name}: input must have shape [..., {features}] on each rank "
                f"(features={self.features}, {self.grid.shape}), got {list(x.shape)}"
            )

    def _normalized(self, x: Tensor, *, centred: bool) -> Tensor:
        self._check_input(x)
        collectives.refuse_transforms(type(self).__name__)
        algorithm = collectives.algorithm_of_collective(self.algorithm, x)
        split = [self.grid.axis(name) for name in self.split_over]
        axes = tuple((axis.name, axis.size, algorithm) for axis in split)
        return _Normalize.apply(
            x, self.weight, self.bias, centred, self.plus_one, self.features, self.eps, axes
        )

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}, layout={self.layout}"


class RMSNorm(_Norm):
    """RMSNorm over features that are split over y.

        x / sqrt(mean(x^2) + eps) * weight      x [m / Gx, H / Gy]   (replicated: [..., H / Gy])

    Collectives: an all-reduce over y of one number per row, in forward and in backward. plus_one:
    rows are multiplied by 1 + weight, which begins with zeros, as in Gemma.
    """

    def __init__(
        self,
        features: int,
        *,
        grid: Grid,
        plus_one: bool = False,
        eps: float = 1e-5,
        layout: str = "sharded",
        algorithm: str = "auto",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.plus_one = plus_one
        super().__init__(
            features, grid=grid, eps=eps, layout=layout, algorithm=algorithm, seed=seed,
            dtype=dtype, device=device,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self._normalized(x, centred=False)


class LayerNorm(_Norm):
    """LayerNorm over features that are split over y.

        (x - mean) / sqrt(var + eps) * weight + bias      x as in RMSNorm

    Collectives: an all-gather over y of two numbers per row in forward, and an all-reduce over y of
    two numbers per row in backward. bias: False leaves the bias out, as in Cohere's models.
    """

    def __init__(
        self,
        features: int,
        *,
        grid: Grid,
        bias: bool = True,
        eps: float = 1e-5,
        layout: str = "sharded",
        algorithm: str = "auto",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.has_bias = bias
        super().__init__(
            features, grid=grid, eps=eps, layout=layout, algorithm=algorithm, seed=seed,
            dtype=dtype, device=device,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.size("y") > 1:
            return self._normalized(x, centred=True)
        self._check_input(x)
        return F.layer_norm(x, (self.features,), self.weight, self.bias, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm over the D features of each head, x [..., D].

    All heads have one weight [D], which every rank holds whole. The module issues no collectives;
    `sync_gradients` sums the gradient over the axes that split heads and rows.
    """

    split_over = ()

    def _spec(self, value: float) -> ParameterSpec:
        # In `replicated` all y ranks compute the same.
        summed_over = ("x", "y", "z", "data") if self.layout == "sharded" else ("x", "z", "data")
        return ParameterSpec((self.features,), {}, summed_over, Init.constant(value))


class AllHeadsNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the features of all heads, x [..., heads D / parts].

    The weight has an element for each feature of each head, and is split as the heads are: over x,
    and over y as well with heads_over_y. Collectives: an all-reduce over these axes of one number
    per row, in forward and in backward. Source: OLMo et al., arXiv:2501.00656.
    """

    def __init__(
        self,
        features: int,
        *,
        grid: Grid,
        heads_over_y: bool = False,
        eps: float = 1e-5,
        layout: str = "sharded",
        algorithm: str = "auto",
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.split_over = ("x", "y") if heads_over_y else ("x",)
        super().__init__(
            features, grid=grid, eps=eps, layout=layout, algorithm=algorithm, seed=seed,
            dtype=dtype, device=device,
        )  # fmt: skip

    def _spec(self, value: float) -> ParameterSpec:
        splits_rows = self.layout == "sharded" and "y" not in self.split_over
        summed_over = ("y", "z", "data") if splits_rows else ("z", "data")
        dims = {0: self.split_over}
        return ParameterSpec((self.features,), dims, summed_over, Init.constant(value))

    def forward(self, x: Tensor) -> Tensor:
        return self._normalized(x, centred=False)


class _Normalize(torch.autograd.Function):
    """LayerNorm if `centred`, otherwise RMSNorm, as one node of the autograd graph.

    Autograd of the formula would pass over the rows four times as often, and save four tensors of
    their size for backward instead of one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        centred: bool,
        plus_one: bool,
        features: int,
        eps: float,
        axes: tuple[_Axis, ...],
    ) -> Tensor:
        wide = _wide(x)
        if not centred:
            squares = _all_reduce(wide.square().sum(-1, keepdim=True), axes)
            rstd = torch.rsqrt(squares / features + eps)
            normal = wide * rstd
        else:
            mean, rstd = _moments(wide, features, eps, *axes[0])
            normal = (wide - mean).mul_(rstd)
        scaled = normal * (1 + _wide(weight)) if plus_one else None
        normal = normal.to(x.dtype)
        ctx.save_for_backward(normal, rstd, weight)
        ctx.plus_one = plus_one
        ctx.features, ctx.axes = features, axes
        ctx.centred, ctx.has_bias = centred, bias is not None
        if scaled is not None:
            return scaled.to(x.dtype)
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Computes dx = (g - mean(g) - normal * mean(g * normal)) * rstd, where g = dy * weight.

        RMSNorm has no mean(g) term. Means are over all features.
        """
        normal, rstd, weight = ctx.saved_tensors
        dtype, wide = dy.dtype, _wide(dy)
        wide_weight = _wide(weight) + 1 if ctx.plus_one else _wide(weight)
        product = wide * normal
        sums = [product @ wide_weight]
        if ctx.centred:
            sums.append(wide @ wide_weight)
        means = _all_reduce(torch.stack(sums), ctx.axes).unsqueeze(-1) / ctx.features
        dx = wide * wide_weight
        if ctx.centred:
            dx.sub_(means[1])
        dx.sub_(normal * means[0]).mul_(rstd)
        dweight = product.flatten(0, -2).sum(0).to(dtype)
        dbias = wide.flatten(0, -2).sum(0).to(dtype) if ctx.has_bias else None
        return dx.to(dtype), dweight, dbias, *[None] * 5


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


def _all_reduce(value: Tensor, axes: Sequence[_Axis]) -> Tensor:
    for name, size, algorithm in axes:
        if size > 1:
            value = torch.ops.axonn.all_reduce(value, "sum", name, size, algorithm)
    return value


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
