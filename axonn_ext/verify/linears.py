"""Compares a Linear on every grid, on GPUs, with plain torch in float64 on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from axonn_ext import full_gradients, full_state_dict, nn, sync_gradients
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.parallel import ROLES
from axonn_ext.verify.accuracy import relative_error


def factorisations(world_size: int) -> list[GridShape]:
    """Returns every way to lay out `world_size` ranks over x, y, z and data."""
    sizes = itertools.product(range(1, world_size + 1), repeat=4)
    return [GridShape(*s) for s in sizes if math.prod(s) == world_size]


def every_grid() -> list[Grid]:
    """Returns every grid of all ranks. Call this only once, since groups take time to connect."""
    return [Grid(**shape.as_dict()) for shape in factorisations(dist.get_world_size())]


def linear_errors(
    grid: Grid,
    role: str,
    layout: str,
    algorithm: str,
    *,
    dtype: torch.dtype = torch.float64,
    sizes: tuple[int, int, int],
) -> dict[str, float]:
    """Returns the relative errors of one forward and backward; sizes: rows, in and out features."""
    rows, features_in, features_out = sizes
    layer = nn.Linear(
        features_in, features_out, grid=grid, role=role, layout=layout, dtype=dtype,
        algorithm=algorithm,
    ).cuda()  # fmt: skip
    torch.manual_seed(7)
    x = torch.randn(rows, features_in).to(dtype)
    dy = torch.randn(rows, features_out).to(dtype)
    state = {name: t.cpu().double().requires_grad_() for name, t in full_state_dict(layer).items()}
    x_ref = x.to(torch.float64, copy=True).requires_grad_()  # x itself has no gradient
    y_ref = torch.nn.functional.linear(x_ref, state["weight"], state["bias"])
    y_ref.backward(dy.double())

    local_x = grid.shard(x, layer.input_dims).cuda().requires_grad_()
    y = layer(local_x)
    y.backward(grid.shard(dy, layer.output_dims).cuda())
    sync_gradients(layer)
    grads = full_gradients(layer)
    assert local_x.grad is not None
    got = {
        "y": (grid.unshard(y, layer.output_dims), y_ref),
        "dx": (grid.unshard(local_x.grad, layer.input_dims), x_ref.grad),
        "dweight": (grads["weight"], state["weight"].grad),
        "dbias": (grads["bias"], state["bias"].grad),
    }
    return {name: relative_error(a.cpu(), b) for name, (a, b) in got.items() if b is not None}


def linear_failures(
    grids: Iterable[Grid],
    layout: str,
    algorithm: str,
    *,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    limit: float,
) -> list[str]:
    """Returns, for each grid and both roles, which errors exceed the limit."""
    return [
        f"{grid.shape} {role} {layout} {name}: {error:.1e} > {limit:.1e}"
        for grid, role in itertools.product(grids, ROLES)
        for name, error in linear_errors(
            grid, role, layout, algorithm, dtype=dtype, sizes=sizes
        ).items()
        if not error <= limit
    ]
