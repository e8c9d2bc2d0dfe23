"""AdamW with its state on the host, or sharded over data, compared with plain AdamW."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import zero_cases
from axonn_ext import GridShape
from axonn_ext.optim import AdamW
from zero_cases import Setup

pytestmark = pytest.mark.gpu


def train(offload: str, dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], int, int]:
    """Returns the weights, the peak memory in bytes, and the number of parameters."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(1024, 1024, dtype=dtype, device="cuda") for _ in range(12)),
        nn.Linear(1024, 33, dtype=dtype, device="cuda"),
    )
    optimizer = AdamW(model, lr=1e-3, offload=offload, bucket_elements=1 << 20)
    data = torch.randn(64, 1024, dtype=dtype, device="cuda")
    for _ in range(steps):
        model(data).float().square().mean().backward()
        optimizer.step(gradient_factor=0.5)
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    weights = [p.detach().cpu() for p in model.parameters()]
    return weights, peak, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_on_the_device(offload: str, dtype: torch.dtype) -> None:
    """GPU and host may round a fused multiply-add differently, so bits may differ in fp32.

    An update is at most about lr. A rounding of a moment changes it by a few units of 2**-24, and
    changes a weight in low precision by at most one unit in its last place.
    """
    ours, _, _ = train(offload, dtype, 20)
    theirs, _, _ = train("none", dtype, 20)
    close = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close * 1e-2)


def test_device_bytes() -> None:
    _, off, numel = train("cpu", torch.bfloat16, 2)
    _, on, _ = train("none", torch.bfloat16, 2)
    assert off <= 4 * numel + 16 * (1 << 20)
    assert on >= 20 * numel


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("shape", [GridShape(data=2), GridShape(z=2, data=2)], ids=GridShape.short)
def test_zero_is_as_without(gpu_pool, shape, zero, overlap):
    setup = Setup(
        shape, zero, "cpu" if zero == 1 else "none", dtype=torch.bfloat16, overlap=overlap,
        micro_batches=2, device="cuda",
    )  # fmt: skip
    for found in gpu_pool(shape.size).run(zero_cases.compare, setup):
        assert found["left"] == 0
        assert max(found["gradients"], found["metrics"]) < zero_cases.CLOSE[torch.bfloat16]
        assert found["weights"] < zero_cases.CLOSE_WEIGHTS[torch.bfloat16]
