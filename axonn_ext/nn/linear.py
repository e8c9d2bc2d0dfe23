"""The Linear of the 3D parallel matmul.

Legend: M rows of the global batch, m = M / (Gd Gz) of them in one (data, z) group; K, N in and out
features; (r, s) = (x, y) for the role "expand" and (y, x) for "contract".
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from axonn_ext.nn.adapter import Adapter
from axonn_ext.nn.sharded import Init, ParameterSpec, ShardedModule, initialize, rows_over
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Dims, Grid
from axonn_ext.spec.parallel import ALGORITHMS, LAYOUTS, ROLES, check_choice


class ProductOptions(NamedTuple):
    """The non-tensor arguments of `linear_forward`, in its order.

    group_names, group_sizes: of r, s, z and all ranks of the model; the size of z is 1 for an
    already gathered weight
    """

    group_names: list[str]
    group_sizes: list[int]
    sharded: bool
    gather_dim: int
    scatter_dim: int
    save_input: bool
    save_weight: bool
    algorithm: str
    deterministic: bool


class Deferral(Protocol):
    """Defers weight gradients until after backward; see axonn_ext.nn.deferred."""

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, options: ProductOptions
    ) -> Tensor | None:
        """Returns a Linear's product, or None if the Linear should compute it as usual."""


class Linear(ShardedModule):
    """A 4D Linear: axes x and y split its weight into blocks, and z splits the rows of each block.

    Per rank, in layout "sharded" (and in "replicated" where it differs):

        x  [m / Gr, K / Gs]   (replicated: [..., K / Gs], equal on all ranks of r)
        y  [m / Gs, N / Gr]   (replicated: [..., N / Gr], equal on all ranks of s)
        W  [N / (Gr Gz), K / Gs]            b  [N / Gr]

        forward  y  = reduce_scatter_s(all_gather_r(x) @ all_gather_z(W).T) + b
        dgrad    dx = reduce_scatter_r(all_gather_s(dy) @ W)
        wgrad    dW = reduce_scatter_z(all_gather_s(dy).T @ all_gather_r(x))

    In "replicated" there are no all-gathers of x and dy, and the reduce-scatters of y and dx are
    all-reduces. Roles alternate: the output of an expand Linear is laid out like the input of a
    contract Linear. After backward, `sync_gradients` sums dW over data, and db over z and data.

    Args:
        role: "expand" (qkv, up, gate, lm_head) or "contract" (out-projection, down).
        layout: "sharded" (rows stay scattered) or "replicated" (AxoNN's own).
        save_gathered: keep the gathered x for wgrad instead of gathering it again in backward. This
            takes Gr times the memory and saves one collective.
        reshard_after_forward: gather W over z again in backward instead of keeping it. Ignored if
            the module has a weight_source, which decides this itself.
        gather_dim, scatter_dim: the dim of x that is gathered over r, and the dim of y that is
            scattered over s. With 1 instead of 0, x is [m, K / (Gs Gr)], or y [m, N / (Gr Gs)];
            the collective moves the same number of bytes.
        deterministic: whether all-reduces of y and dx, in layout "replicated", give the same bits
            from call to call; the same on all ranks. See `axonn_ext.ops.matmul_all_reduce`.
        init: the distribution of the weight's initial values; default as in torch.nn.Linear.
        seed, name: the initial values of the weight depend on (seed, name + ".weight"), so Linears
            with equal names start equal. `initialize(model, seed=...)` uses the full names of all
            parameters of a model instead. With seed=None they are left uninitialised.

    Raises:
        ValueError: the grid does not divide a dimension, or role, layout or algorithm is unknown.
    Source: AxoNN, arXiv:2502.08145, section 3 (Algorithm 1); arXiv:2305.13525.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    adapter: Adapter | None  # low-rank updates, if any
    deferral: Deferral | None  # None: backward computes the gradient of the weight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        grid: Grid,
        role: str,
        bias: bool = True,
        layout: str = "sharded",
        save_gathered: bool = False,
        reshard_after_forward: bool = True,
        gather_dim: int = 0,
        scatter_dim: int = 0,
        algorithm: str = "auto",
        deterministic: bool = True,
        init: Init | None = None,
        seed: int | None = 0,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(grid)
        check_choice("role", role, tuple(ROLES))
        check_choice("layout", layout, LAYOUTS)
        check_choice("algorithm", algorithm, ALGORITHMS)
        self.in_features, self.out_features = in_features, out_features
        self.role, self.layout = role, layout
        self.save_gathered, self.reshard_after_forward = save_gathered, reshard_after_forward
        self.gather_dim, self.scatter_dim, self.algorithm = gather_dim, scatter_dim, algorithm
        self.deterministic = deterministic
        self._r, self._s = ROLES[role]
        axes = [*(grid.axis(axis) for axis in (self._r, self._s, "z")), grid.model_group]
        self._group_names = [axis.name for axis in axes]
        self._group_sizes = [axis.size for axis in axes]
        r, s, _, model = self._group_sizes
        self._group_sizes_gathered = [r, s, 1, model]  # for a weight that is already gathered
        self._check_features()
        self._local_in_features = in_features // grid.num_parts(self.input_dims[1])
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self._add_parameters(bias, init or Init.uniform(bound), bound, dtype, device)
        self.adapter = self.deferral = None
        if seed is not None:
            initialize(self, seed=seed, prefix=name)

    def _add_parameters(
        self, bias: bool, init: Init, bound: float, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (self.out_features, self.in_features)
        weight = ParameterSpec(shape, {0: (self._r, "z"), 1: (self._s,)}, ("data",), init)
        self.add_parameter("weight", weight, dtype=dtype, device=device)
        if bias:
            # The gradient of the bias is the column sum of dY gathered over s, which has all rows
            # of the (data, z) group.
            spec = ParameterSpec(shape[:1], {0: (self._r,)}, ("z", "data"), Init.uniform(bound))
            self.add_parameter("bias", spec, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def _check_features(self) -> None:
        """Raises ValueError if the grid does not divide the features of the input or the output.

        `add_parameter` checks the dims of the parameters, but not features that gather_dim or
        scatter_dim also splits over r or s.
        """
        if self.layout == "replicated" and (self.gather_dim or self.scatter_dim):
            raise ValueError("gather_dim and scatter_dim must be 0 in layout 'replicated'")
        for label, features, dims in (
            ("in_features", self.in_features, self.input_dims),
            ("out_features", self.out_features, self.output_dims),
        ):
            parts = self.grid.num_parts(dims[1])
            if features % parts:
                raise ValueError(
                    f"Linear ({self.role}): {label}={features} must be divisible by {parts} "
                    f"(axes {', '.join(f'{a}={self.grid.size(a)}' for a in dims[1])})"
                )

    def _dims(self, rows_axis: str, features_axis: str, moved_dim: int) -> Dims:
        if moved_dim == 1:
            return {0: ("data", "z"), 1: (features_axis, rows_axis)}
        return {0: rows_over(self.layout, rows_axis), 1: (features_axis,)}

    @property
    def input_dims(self) -> Dims:
        """How the grid splits the input [rows, features], as `grid.shard` takes it."""
        return self._dims(self._r, self._s, self.gather_dim)

    @property
    def output_dims(self) -> Dims:
        """How the grid splits the output [rows, features], as `grid.shard` takes it."""
        return self._dims(self._s, self._r, self.scatter_dim)

    def gather_weight(self) -> Tensor:
        """Returns the weight gathered over z, [N / Gr, K / Gs], for `forward(x, weight=...)`.

        A weight that is used twice is then gathered only once, and its two gradients are added
        before a single reduce-scatter.
        """
        if self.weight_source is not None:
            return self.weight_source.gather(self.weight)
        return collectives.all_gather(self.weight, self.grid.axis("z"), algorithm=self.algorithm)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, held: Tensor | None = None
    ) -> Tensor:
        """Returns the output; see the class docstring for shapes and collectives.

        weight: the result of `gather_weight` of this or of another module; default this module's
        own weight, which is then gathered here. held: the same, of a module with a weight_source,
        within a function that this source applies.
        """
        self._check_input(x)
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        if held is not None:
            y = self._multiply(rows, held, gathered=True)
        elif self.weight_source is not None:
            whole = self.gather_weight() if weight is None else weight
            y = self.weight_source.apply([whole], partial(self._multiply, rows, gathered=True))
        elif weight is not None:
            y = self._multiply(rows, weight, gathered=True)
        else:
            y = self._multiply(rows, self.weight, gathered=False)
        if self.adapter is not None:
            y = self.adapter(rows, y)
        return y.unflatten(0, x.shape[:-1]) if x.dim() > 2 else y

    def _multiply(self, x: Tensor, weight: Tensor, *, gathered: bool) -> Tensor:
        keeps = torch.is_grad_enabled()
        options = ProductOptions(
            self._group_names,
            self._group_sizes_gathered if gathered else self._group_sizes,
            self.layout == "sharded",
            self.gather_dim,
            self.scatter_dim,
            self.save_gathered and keeps,
            not self.reshard_after_forward and keeps,
            self.algorithm,
            self.deterministic,
        )
        if self.deferral is not None:
            deferred = self.deferral.multiply(x, weight, self.bias, options)
            if deferred is not None:
                return deferred
        y, _, _ = torch.ops.axonn.linear_forward.default(x, weight, self.bias, *options)
        return cast(Tensor, y)

    def _check_input(self, x: Tensor) -> None:
        check_tensor("Linear", "input", x, self.weight.device)
        features = self._local_in_features
        if x.shape[-1] != features or x.dim() < 2 or (x.dim() > 2 and self.layout == "sharded"):
            leading = "rows" if self.layout == "sharded" else "..."
            raise ValueError(
                f"Linear ({self.role}, {self.layout}): input must have shape "
                f"[{leading}, {features}] on each rank "
                f"(in_features={self.in_features}, {self.grid.shape}), got {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, role={self.role}, layout={self.layout}"
        )
