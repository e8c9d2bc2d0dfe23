"""Linear and a transformer against the CPU, and the speed of one GPU against plain torch."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape, full_gradients, models, nn, sync_gradients
from axonn_ext.calibrate.measure import Ranks, measure
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.verify.linears import linear_failures
from grids import bound, every_grid, grid_of, relative_error

pytestmark = pytest.mark.gpu

ROWS, IN, OUT = 48, 24, 40  # divisible by every grid of 4 in every role


def check_linears(layout: str, algorithm: str) -> list[str]:
    return linear_failures(
        every_grid(), layout, algorithm, dtype=torch.float64, sizes=(ROWS, IN, OUT),
        limit=bound(torch.float64, ROWS),
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["chunked", "sequential", "auto"])
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linear_on_every_grid(gpu_pool, world_size, layout, algorithm):
    for failures in gpu_pool(world_size).run(check_linears, layout, algorithm):
        assert not failures, "\n".join(failures)


def loss_and_gradients(device: str, layout: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a small GPT-2 on a grid over x with all ranks, in fp64."""
    grid = grid_of(GridShape(x=dist.get_world_size()))
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, sequence_length=16
    )
    model = models.build(
        config, grid, ParallelConfig(layout=layout, algorithm="sequential"), dtype=torch.float64
    ).to(device)
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1)).to(device)
    loss = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 64.0)
    loss.backward()
    sync_gradients(model)
    return loss.item(), {name: g.cpu() for name, g in full_gradients(model).items()}


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_equals_that_of_the_cpu(pool, gpu_pool, world_size, layout):
    on_cpu = pool(world_size).run(loss_and_gradients, "cpu", layout)
    on_gpu = gpu_pool(world_size).run(loss_and_gradients, "cuda", layout)
    for (want_loss, want), (loss, got) in zip(on_cpu, on_gpu, strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-12)
        assert got.keys() == want.keys()
        for name, gradient in got.items():
            assert relative_error(gradient, want[name]) < 1e-10, name


def check_initial_values() -> float:
    """The largest difference between the values drawn on the two devices, in ulps of fp32."""
    grid = grid_of(GridShape())
    on_cpu, on_gpu = (
        nn.Linear(64, 96, grid=grid, role="expand", device=device) for device in ("cpu", "cuda")
    )
    difference = (on_gpu.weight.detach().cpu() - on_cpu.weight.detach()).abs().max().item()
    return difference / torch.finfo(torch.float32).eps


def test_a_linear_is_made_on_the_gpu(gpu_pool):
    if not torch._C._dispatch_has_kernel_for_dispatch_key("axonn::fill_random_", "CUDA"):
        pytest.skip("the CUDA parts are not built, and with them the kernel of fill_random_")
    assert gpu_pool(1).run(check_initial_values)[0] <= 1


def speed_against_torch(bias: bool) -> float:
    """Time of a Linear's forward and backward over that of torch.nn.Linear, on one GPU."""
    rows, width, dtype = 8192, 8192, torch.bfloat16
    ours = nn.Linear(
        width, width, grid=grid_of(GridShape()), role="expand", bias=bias, seed=None, dtype=dtype
    ).cuda()
    theirs = torch.nn.Linear(width, width, bias=bias, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter, values in zip(ours.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(values)
    x = torch.randn(rows, width, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(rows, width, device="cuda", dtype=dtype)

    def run(layer: torch.nn.Module) -> None:
        layer(x).backward(dy)
        x.grad = None
        layer.zero_grad()

    calls = {"ours": lambda: run(ours), "theirs": lambda: run(theirs)}
    for call in (*calls.values(), *calls.values()):
        call()
    times = measure(
        calls, Ranks(dist.new_group(backend="gloo")), rounds=15,
        synchronize=torch.cuda.current_stream().synchronize,
    )  # fmt: skip
    return statistics.median(
        a / b for a, b in zip(times["ours"].samples_us, times["theirs"].samples_us, strict=True)
    )


@pytest.mark.timing
@pytest.mark.parametrize("bias", [True, False])
def test_one_gpu_is_as_fast_as_torch(gpu_pool, bias):
    (ratio,) = gpu_pool(1).run(speed_against_torch, bias)
    assert ratio < 1.2  # `axonn-ext bench` measures it precisely
