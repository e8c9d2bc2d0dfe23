"""The benchmark of one GPT-2 transformer block, forward and backward.

Legend: B sequences of S tokens, m = B S / Gz rows of one z group, H hidden and F MLP features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_ext import models, nn
from axonn_ext.bench.case import Case, Collective, Spec, bind_all, call_all
from axonn_ext.bench.linear import LinearSizes
from axonn_ext.bench.reference import Expected, Outputs, Whole, round_off
from axonn_ext.calibrate.shapes import BlockShape, GemmShape
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.checkpoint.whole_tensors import full_state_dict
from axonn_ext.models import Transformer
from axonn_ext.models.block import Block
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.nn.sharded import rows_over
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Dims, Grid
from axonn_ext.spec.parallel import ParallelConfig

# The gradient of the input passes four matmuls, attention, two norms and a GELU in forward, and
# their derivatives in backward. Errors of these 16 steps add up like a random walk.
NUM_STEPS = 16
BLOCK = "blocks.0."
PUBLIC_BLOCK = "transformer.h.0."


def block_case(spec: Spec, grid: Grid) -> Case:
    """Returns the case of a block: its output, and the gradients of its input and parameters.

    x [m / Gx, H / Gy] -> same (replicated: m rows).
    """
    shape, dtype, layout = spec.shape, DTYPES[spec.dtype], spec.options["layout"]
    assert isinstance(shape, BlockShape)
    built = {
        name: models.build(
            shape.model(spec.grid),
            grid,
            ParallelConfig(layout=layout, algorithm=name),
            dtype=dtype,
            device=spec.device,
        )
        for name in spec.algorithms
    }
    rows = shape.batch * shape.sequence
    x, dy = (Whole(name, rows, shape.hidden, dtype, spec.device) for name in ("x", "dy"))
    x_all, dy_all = (whole.block(whole.rows, whole.columns) for whole in (x, dy))
    dims: Dims = {0: rows_over(layout, "x"), 1: ("y",)}
    local_x, local_dy = grid.shard(x_all, dims).requires_grad_(), grid.shard(dy_all, dims)

    def run(block: Block) -> Outputs:
        local_x.grad = None
        for parameter in block.parameters():
            parameter.grad = None
        y = block(local_x, shape.sequence)
        y.backward(local_dy)
        gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
        assert local_x.grad is not None
        return {"y": y.detach(), "dx": local_x.grad, **gradients}

    model = next(iter(built.values()))  # the models differ only in their algorithm
    sizes = _BlockSizes(shape, grid, layout, dtype, spec.device)
    return Case(
        spec,
        partial(call_all, sizes.arithmetic()),
        bind_all(sizes.collectives()),
        {name: partial(run, _block(model)) for name, model in built.items()},
        _expected(model, x_all, dy_all, shape, dims),
        partial(_complete, _block(model)),
    )


def _block(model: Transformer) -> Block:
    (block,) = model.get_submodule(BLOCK.split(".")[0]).children()
    assert isinstance(block, Block)
    return block


def _complete(block: Block, outputs: Outputs) -> Outputs:
    """Sums the gradients of the parameters as `sync_gradients` would."""
    complete = dict(outputs)
    for p in nn.sharded_parameters(block):
        for axis in p.spec.summed_over:
            if p.name in complete:
                complete[p.name] = collectives.all_reduce(
                    complete[p.name], p.grid.axis(axis), algorithm="sequential"
                )
    return complete


def _expected(
    model: Transformer, x: Tensor, dy: Tensor, shape: BlockShape, dims: Dims
) -> dict[str, Expected]:
    """Returns this rank's blocks of what plain torch.nn computes on the whole input in float64."""
    plain = PlainTransformer(model.config)
    plain.load_state_dict(full_state_dict(model))
    plain.to(x.device, torch.float64)
    reference = plain.get_submodule(PUBLIC_BLOCK.rstrip("."))
    x_ref = x.double().unflatten(0, (shape.batch, shape.sequence)).requires_grad_()
    y_ref = reference(x_ref)
    y_ref.backward(dy.double().view_as(y_ref))
    assert x_ref.grad is not None
    public = {
        PUBLIC_BLOCK + name: p.grad
        for name, p in reference.named_parameters()
        if p.grad is not None
    }
    gradients = {name.removeprefix(BLOCK): g for name, g in model.import_state(public).items()}
    grid, dtype = model.grid, x.dtype
    terms = max(x.shape[0], model.config.mlp_size)
    limit = round_off(dtype, terms, grid.world_size) * math.sqrt(NUM_STEPS)
    whole = {"y": y_ref.detach().flatten(0, 1), "dx": x_ref.grad.flatten(0, 1)}
    places = dict.fromkeys(whole, dims)
    places |= {p.name: p.spec.dims for p in nn.sharded_parameters(_block(model))}
    return {
        name: Expected(grid.shard(values, places[name]), limit)
        for name, values in (whole | gradients).items()
    }


class _BlockSizes:
    """The sizes of one rank's computation and messages for a block, forward and backward."""

    def __init__(
        self, shape: BlockShape, grid: Grid, layout: str, dtype: torch.dtype, device: str
    ) -> None:
        self.shape, self.grid, self.layout, self.dtype = shape, grid, layout, dtype
        self.device = device
        m = shape.batch * shape.sequence // grid.size("z")
        sharded = layout == "sharded"
        self.residual_rows = m // grid.size("x") if sharded else m
        self.inner_rows = m // grid.size("y") if sharded else m  # rows in attention and the MLP
        self.mlp_size = shape.model(grid.shape).mlp_size
        h = shape.hidden
        rows = shape.batch * shape.sequence
        self.linears = [
            LinearSizes.of(grid, GemmShape(rows, n, k), role=role, layout=layout, device=device)
            for role, n, k in (
                ("expand", 3 * h, h), ("contract", h, h),
                ("expand", self.mlp_size, h), ("contract", h, self.mlp_size),
            )
        ]  # fmt: skip

    def arithmetic(self) -> list[Callable[[], object]]:
        """Returns every piece separately in plain torch, forward and backward.

        Their rows are laid out differently, so without communication they do not form a network.
        """
        return [
            *(call for linear in self.linears for call in linear.matmuls(self.dtype)),
            *(call for linear in self.linears for call in self._bias(linear)),
            *(self._layer_norm() for _ in range(2)),
            self._attention(),
            self._gelu(),
            *(self._add() for _ in range(4)),  # two residual sums, and two sums of gradients
        ]

    def collectives(self) -> list[Collective]:
        """Returns the collectives that "sequential" issues, in the order of the layers."""
        y = self.grid.axis("y")
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        statistics = [
            Collective("all_gather", y, (1, 2, self.residual_rows), wide, self.device),
            Collective("all_reduce", y, (2, self.residual_rows), wide, self.device),
        ]
        linears = [c for linear in self.linears for c in linear.collectives(self.dtype)]
        return [*linears, *statistics, *statistics]

    def _bias(self, linear: LinearSizes) -> list[Callable[[], object]]:
        rows = linear.m // linear.s.size if linear.sharded else linear.m
        y, dy = self._random(rows, linear.n), self._random(linear.m, linear.n)
        bias = torch.zeros(linear.n, dtype=self.dtype, device=self.device)
        return [partial(y.add_, bias), partial(dy.sum, 0)]

    def _layer_norm(self) -> Callable[[], object]:
        x = self._random(self.residual_rows, self.shape.hidden // self.grid.size("y"))
        weight, bias = (torch.ones_like(x[0]) for _ in range(2))
        function = partial(F.layer_norm, normalized_shape=(x.shape[1],))
        return _forward_backward(lambda x, w, b: function(x, weight=w, bias=b), x, weight, bias)

    def _attention(self) -> Callable[[], object]:
        heads = self.shape.heads // self.grid.size("x")
        sequences = self.inner_rows // self.shape.sequence
        head_dim = self.shape.hidden // self.shape.heads
        qkv = self._random(sequences, self.shape.sequence, heads, 3, head_dim)

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).flatten(2)

        return _forward_backward(attend, qkv)

    def _gelu(self) -> Callable[[], object]:
        x = self._random(self.inner_rows, self.mlp_size // self.grid.size("x"))
        return _forward_backward(partial(F.gelu, approximate="tanh"), x)

    def _add(self) -> Callable[[], object]:
        x = self._random(self.residual_rows, self.shape.hidden // self.grid.size("y"))
        return partial(torch.add, x, x.clone())

    def _random(self, *sizes: int) -> Tensor:
        values = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
        return values.to(self.device, self.dtype)


def _forward_backward(
    function: Callable[..., Tensor], *inputs: Tensor
) -> Callable[[], Sequence[Tensor]]:
    for tensor in inputs:
        tensor.requires_grad_()
    with torch.no_grad():
        dy = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, dy)
