"""torch.compile(fullgraph=True) gives the eager result, at 2 ranks and then at 4 on one cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from axonn_ext import GridShape, models, nn
from grids import grid_of, relative_error

pytestmark = pytest.mark.long

LIMIT = 2e-6  # fp32: a fused kernel may add in another order


def use_cache(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()


def compare(function, inputs: torch.Tensor, parameters: list[torch.Tensor]) -> dict[str, float]:
    results = []
    compiled = torch.compile(function, fullgraph=True)
    for run in (function, compiled):
        x = inputs.clone().requires_grad_()
        y = run(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
        results.append([y.detach(), *grads])
    return {
        f"output {i}": relative_error(got, want)
        for i, (want, got) in enumerate(zip(*results, strict=True))
    }


def check_linear(shape: GridShape, layout: str, folder: str) -> dict[str, float]:
    use_cache(folder)
    grid = grid_of(shape)
    layer = nn.Linear(16, 32, grid=grid, role="expand", layout=layout)
    torch.manual_seed(1)
    x = grid.shard(torch.randn(16, 16), layer.input_dims)
    return compare(layer, x, list(layer.parameters()))


def check_loss(shape: GridShape, layout: str, folder: str) -> dict[str, float]:
    """In place, which compiled code is not."""
    use_cache(folder)
    grid = grid_of(shape)
    loss = nn.CrossEntropy(grid=grid, layout=layout, in_place=True)
    torch.manual_seed(1)
    logits = torch.randn(8, 6)
    labels = torch.randint(6 * shape.x, (8,))
    labels[3] = -100
    return compare(lambda x: loss(2 * x, labels), logits, [])


def check_block(shape: GridShape, family: str, folder: str) -> dict[str, float]:
    use_cache(folder)
    grid = grid_of(shape)
    config = models.ModelConfig(
        family=family, vocab_size=32, hidden_size=16, num_layers=1, num_heads=4,
        num_kv_heads=2 if family == "llama" else None, sequence_length=8, intermediate_size=32,
    )  # fmt: skip
    model = models.build(config, grid, seed=3)
    block = model.blocks[0]
    torch.manual_seed(1)
    x = grid.shard(torch.randn(32, 16), block.attention.qkv.input_dims)
    return compare(lambda x: block(x, 8), x, list(block.parameters()))


def run_at_two_then_four(pool, check, *arguments: object) -> None:
    for world_size, shape in ((2, GridShape(x=2)), (4, GridShape(x=2, y=2))):
        for errors in pool(world_size).run(check, shape, *arguments):
            assert max(errors.values()) <= LIMIT, (shape, errors)


@pytest.mark.parametrize("layout", ["sharded", pytest.param("replicated", marks=pytest.mark.slow)])
def test_linear(pool, tmp_path: Path, layout: str):
    run_at_two_then_four(pool, check_linear, layout, str(tmp_path))


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_loss(pool, tmp_path: Path, layout: str):
    run_at_two_then_four(pool, check_loss, layout, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_block(pool, tmp_path: Path, family: str):
    run_at_two_then_four(pool, check_block, family, str(tmp_path))
