"""nn.Linear against float64 torch on every grid: output, input, weight and bias gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from axonn_ext import (  # fmt: skip
    Grid,
    GridShape,
    full_gradients,
    full_state_dict,
    nn,
    sync_gradients,
)
from axonn_ext.kernels import extension  # fmt: skip
from axonn_ext.spec import settings  # fmt: skip
from grids import bound, factorisations, grid_of, relative_error

ROWS, IN, OUT = 48, 24, 40  # divisible by every grid of 8 in every role
# Cases that fewer ranks cannot have: three axes, or axes of two sizes, each the longer one once.
EIGHT = [
    GridShape(2, 2, 2, 1), GridShape(2, 2, 1, 2), GridShape(2, 1, 2, 2), GridShape(1, 2, 2, 2),
    GridShape(4, 2, 1, 1), GridShape(1, 4, 2, 1), GridShape(1, 1, 4, 2), GridShape(2, 1, 1, 4),
]  # fmt: skip
SHAPES = {1: factorisations(1), 2: factorisations(2), 4: factorisations(4), 8: EIGHT}


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


def check_all(role: str, layout: str, algorithm: str, shapes: list[GridShape]) -> list[str]:
    failures = []
    for shape in shapes:
        for dtype in (torch.float32, torch.float64):
            errors = check_linear(shape, role, layout, dtype, algorithm=algorithm)
            limit = bound(dtype, ROWS)
            failures += [
                f"{shape} {dtype} {name}: {error:.2e} > {limit:.2e}"
                for name, error in errors.items()
                if not error <= limit
            ]
    return failures


@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("role", ["expand", "contract"])
@pytest.mark.parametrize("world_size", list(SHAPES))
def test_matches_float64(pool, world_size, role, layout, algorithm):
    for failures in pool(world_size).run(check_all, role, layout, algorithm, SHAPES[world_size]):
        assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("role", ["expand", "contract"])
def test_matches_float64_on_the_other_grids_of_8(pool, role, layout, algorithm):
    others = [shape for shape in factorisations(8) if shape not in EIGHT]
    for failures in pool(8).run(check_all, role, layout, algorithm, others):
        assert not failures, "\n".join(failures)


def too_large_and_small(shape: GridShape) -> list[str]:
    """The errors of Linears that need too much symmetric memory, each followed by a small one."""
    loaded = settings.load()
    few = settings.MIN_SYMMETRIC_MEMORY_BYTES
    extension.configure(dataclasses.replace(loaded, symmetric_memory_bytes=few))
    try:
        grid, errors = Grid(**shape.as_dict()), []
        for features, rows in ((16, 1 << 18), (8, 1 << 18), (8, 8)):
            layer = nn.Linear(features, features, grid=grid, role="expand", algorithm="fused")
            x = grid.shard(torch.ones(rows, features), layer.input_dims)
            try:
                layer(x)
            except RuntimeError as error:
                errors.append(str(error).splitlines()[0])
        return errors
    finally:
        extension.configure(loaded)


@pytest.mark.parametrize("shape", [GridShape(x=2, y=2), GridShape(y=2, z=2)], ids=str)
def test_one_that_is_too_large_leaves_the_groups_usable(pool, shape):
    for errors in pool(4).run(too_large_and_small, shape):
        assert len(errors) == 2  # only the large ones fail
        for error in errors:
            assert "linear_forward: needs " in error and "AXONN_SYMMETRIC_MEMORY_BYTES" in error


def bias_gradient(algorithm: str, trains_weight: bool) -> torch.Tensor:
    """The bias gradient of rows that are 256 on rank 0 and 1 on the other ranks, in bf16."""
    grid = grid_of(GridShape(y=4))
    layer = nn.Linear(8, 8, grid=grid, role="expand", algorithm=algorithm, dtype=torch.bfloat16)
    layer.weight.requires_grad_(trains_weight)
    x = grid.shard(torch.zeros(64, 8, dtype=torch.bfloat16), layer.input_dims).requires_grad_()
    y = layer(x)
    dy = torch.zeros_like(y)
    dy[0] = 256 if grid.rank == 0 else 1
    y.backward(dy)
    return layer.bias.grad


@pytest.mark.parametrize("trains_weight", [True, False])
@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
def test_a_bias_gradient_is_rounded_once(pool, algorithm, trains_weight):
    """This also holds if rows are read from the peers' memory, as for a frozen weight."""
    for gradient in pool(4).run(bias_gradient, algorithm, trains_weight):
        # bf16 rounds 259 to 260; with a rounding per addition, 256 + 1 would remain 256.
        assert (gradient == 260).all()


OPTIONS = [
    {"save_gathered": True, "reshard_after_forward": False},
    {"save_gathered": True, "reshard_after_forward": False, "algorithm": "chunked"},
    {"gather_dim": 1},
    {"scatter_dim": 1},
    {"gather_dim": 1, "scatter_dim": 1},
    {"layout": "replicated", "deterministic": False},
]


def check_options(role: str) -> list[str]:
    failures = []
    grids = (GridShape(x=4), GridShape(2, 2), GridShape(1, 2, 2), GridShape(y=4), GridShape(z=4))
    for shape in grids:
        for each in OPTIONS:
            options = {"layout": "sharded", "dtype": torch.float64} | each
            errors = check_linear(shape, role, **options)
            limit = bound(torch.float64, ROWS)
            failures += [f"{shape} {options} {n}: {e}" for n, e in errors.items() if not e <= limit]
    return failures


@pytest.mark.parametrize("role", ["expand", "contract"])
def test_options_change_no_result(pool, role):
    for failures in pool(4).run(check_options, role):
        assert not failures, "\n".join(failures)


def gradients_of_three_linears(rows: int) -> float:
    """The error if other Linears use both halves of a workspace before the first one's backward."""
    grid = grid_of(GridShape(z=4))
    keeps = {"save_gathered": True, "reshard_after_forward": False}
    layers = [
        nn.Linear(8, 8, grid=grid, role="expand", algorithm="fused", dtype=torch.float64, **keeps)
        for _ in range(3)
    ]
    torch.manual_seed(7)
    x = torch.randn(4 * rows, 8, dtype=torch.float64)
    states = [full_state_dict(layer) for layer in layers]
    wanted = x.clone().requires_grad_()
    y = wanted
    for state in states:
        y = torch.nn.functional.linear(y, state["weight"], state["bias"])
    y.sum().backward()
    own = grid.shard(x, layers[0].input_dims).requires_grad_()
    layers[2](layers[1](layers[0](own))).sum().backward()
    return relative_error(grid.unshard(own.grad, layers[0].input_dims), wanted.grad)


@pytest.mark.parametrize("rows", [1, 64])  # with many rows, the gathered weight is concatenated
def test_what_is_kept_outlives_the_next_call(pool, rows):
    assert max(pool(4).run(gradients_of_three_linears, rows)) <= bound(torch.float64, 24)


def gradients_of(algorithm: str, shape: GridShape, **options: object) -> list[torch.Tensor]:
    """y, dx, dweight and dbias on this rank; large enough to be split into chunks."""
    grid = grid_of(shape)
    layer = nn.Linear(512, 768, grid=grid, role="expand", algorithm=algorithm, bias=True, **options)
    torch.manual_seed(3)
    x, dy = torch.randn(1024, 512), torch.randn(1024, 768)
    local_x = grid.shard(x, layer.input_dims).requires_grad_()
    y = layer(local_x)
    y.backward(grid.shard(dy, layer.output_dims))
    return [local_x.grad, layer.weight.grad, layer.bias.grad]


def check_overlapped_backward(layout: str) -> list[bool]:
    """Whether bits equal those of "sequential"; both sum the whole dx, in c10d's order."""
    shape = GridShape(x=dist.get_world_size())
    overlapped, plain = (gradients_of(a, shape, layout=layout) for a in ("chunked", "sequential"))
    assert all(t.abs().sum() > 0 for t in plain)
    return [torch.equal(a, b) for a, b in zip(overlapped, plain, strict=True)]


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sum_behind_wgrad_changes_no_bit(pool, world_size, layout):
    for same in pool(world_size).run(check_overlapped_backward, layout):
        assert same == [True, True, True]


def order_of_backward(algorithm: str) -> list[str]:
    """The ops that torch runs in a backward pass on a grid over x, in order."""
    grid = grid_of(GridShape(x=dist.get_world_size()))
    layer = nn.Linear(256, 256, grid=grid, role="expand", algorithm=algorithm, bias=False)
    y = layer(torch.ones(256 // dist.get_world_size(), 256, requires_grad=True))
    dy = torch.ones_like(y)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        y.backward(dy)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    wanted = {"aten::mm": "mm", "axonn::gloo_reduce_scatter": "scatter",
              "c10d::_allgather_base_": "gather"}  # fmt: skip
    return [wanted[event.name] for event in events if event.name in wanted]


def test_collectives_start_before_the_matmul_that_hides_them(pool):
    """First dgrad, then wgrad: gathering x overlaps dgrad, and summing dx overlaps wgrad."""
    for order in pool(2).run(order_of_backward, "chunked"):
        assert order == ["gather", "mm", "scatter", "mm"]
    for order in pool(2).run(order_of_backward, "sequential"):
        assert order == ["mm", "scatter", "gather", "mm"]


def check_bfloat16() -> dict[str, float]:
    return check_linear(GridShape(2, 2), "expand", "sharded", torch.bfloat16)


def test_bfloat16(pool):
    for errors in pool(4).run(check_bfloat16):
        assert max(errors.values()) <= bound(torch.bfloat16, 4), errors  # fp32 sums, few roundings


def check_leading_dims() -> None:
    grid = grid_of(GridShape(2, 2))
    layer = nn.Linear(IN, OUT, grid=grid, role="expand", layout="replicated")
    x = torch.randn(3, 2, 4, IN // 2, generator=torch.Generator().manual_seed(grid.coords["y"]))
    y = layer(x)
    assert y.shape == (3, 2, 4, OUT // 2)
    assert torch.equal(y.flatten(0, 2), layer(x.flatten(0, 2)))


def test_replicated_accepts_leading_dims(pool):
    pool(4).run(check_leading_dims)


def collect_messages() -> list[str]:
    grid, messages = grid_of(GridShape(2, 2)), []
    sharded = nn.Linear(IN, OUT, grid=grid, role="expand")
    for function in (
        lambda: nn.Linear(IN, OUT, grid=grid, role="both"),
        lambda: nn.Linear(IN, OUT, grid=grid, role="expand", layout="row"),
        lambda: nn.Linear(IN, OUT, grid=grid, role="expand", algorithm="best"),
        lambda: nn.Linear(IN, 41, grid=grid, role="expand"),
        lambda: nn.Linear(25, OUT, grid=grid, role="expand"),
        lambda: sharded(torch.ones(4, IN)),
        lambda: sharded(torch.ones(2, 4, IN // 2)),
    ):
        try:
            function()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_error_messages(pool):
    expected = [
        ("role", "'both'", "expand, contract"),
        ("layout", "'row'", "sharded, replicated"),
        ("algorithm", "'best'", "fused"),
        ("out_features=41", "divisible by 2", "x=2"),
        ("in_features=25", "divisible by 2", "y=2"),
        ("[rows, 12]", "got [4, 24]"),
        ("[rows, 12]", "got [2, 4, 12]"),
    ]
    for messages in pool(4).run(collect_messages):
        for message, parts in zip(messages, expected, strict=True):
            assert message and all(part in message for part in parts), message
