"""nn.Linear against float64 torch on every grid: output, input, weight and bias gradients."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import GridShape, full_gradients, full_state_dict, nn, sync_gradients
from grids import bound, factorisations, grid_of, relative_error

ROWS, IN, OUT = 48, 24, 40  # divisible by every grid of 8 in every role


def check_linear(
    shape: GridShape, role: str, layout: str, dtype: torch.dtype, **options: object
) -> dict[str, float]:
    """Relative errors of one forward and backward."""
    grid = grid_of(shape)
    layer = nn.Linear(IN, OUT, grid=grid, role=role, layout=layout, dtype=dtype, **options)
    torch.manual_seed(7)
    x, dy = torch.randn(ROWS, IN, dtype=dtype), torch.randn(ROWS, OUT, dtype=dtype)
    state = {name: t.double().requires_grad_() for name, t in full_state_dict(layer).items()}
    x_ref = x.clone().double().requires_grad_()
    y_ref = torch.nn.functional.linear(x_ref, state["weight"], state["bias"])
    y_ref.backward(dy.double())

    local_x = grid.shard(x, layer.input_dims).requires_grad_()
    y = layer(local_x)
    y.backward(grid.shard(dy, layer.output_dims))
    sync_gradients(layer)
    grads = full_gradients(layer)
    return {
        "y": relative_error(grid.unshard(y, layer.output_dims), y_ref),
        "dx": relative_error(grid.unshard(local_x.grad, layer.input_dims), x_ref.grad),
        "dweight": relative_error(grads["weight"], state["weight"].grad),
        "dbias": relative_error(grads["bias"], state["bias"].grad),
    }


def check_all(role: str, layout: str, algorithm: str, world_size: int) -> list[str]:
    failures = []
    for shape in factorisations(world_size):
        for dtype in (torch.float32, torch.float64):
            errors = check_linear(shape, role, layout, dtype, algorithm=algorithm)
            limit = bound(dtype, ROWS)
            failures += [
                f"{shape} {dtype} {name}: {error:.2e} > {limit:.2e}"
                for name, error in errors.items()
                if not error <= limit
            ]
    return failures


@pytest.mark.parametrize("algorithm", ["fused", "sequential"])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("role", ["expand", "contract"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_matches_float64_on_every_grid(pool, world_size, role, layout, algorithm):
    for failures in pool(world_size).run(check_all, role, layout, algorithm, world_size):
        assert not failures, "\n".join(failures)
