"""The memory that loading needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from axonn_ext import GridShape, checkpoint, models
from axonn_ext.models import ModelConfig
from axonn_ext.optim import AdamW
from grids import grid_of
from memory import MIB, anonymous_bytes

# 1 GB with AdamW's moments: 12 bytes per parameter.
LARGE = ModelConfig(
    family="llama", vocab_size=32768, hidden_size=768, num_layers=8, num_heads=16,
    sequence_length=128, tie_embeddings=True,
)  # fmt: skip


def make(shape: GridShape, config: ModelConfig) -> tuple[models.Transformer, AdamW]:
    model = models.build(config, grid_of(shape), seed=0)
    return model, AdamW(model.parameters(), lr=1e-3)


def save_large(folder: Path) -> None:
    model, optimizer = make(GridShape(2), LARGE)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    checkpoint.save(folder, model=model, optimizer=optimizer)


def load_large(folder: Path) -> int:
    model, optimizer = make(GridShape(2, 2, 2), LARGE)
    before = anonymous_bytes()
    checkpoint.load(folder, model=model, optimizer=optimizer)
    return anonymous_bytes() - before


@pytest.mark.slow
def test_a_rank_that_loads_needs_memory_for_its_own_blocks_alone(pool, tmp_path) -> None:
    folder = tmp_path / "large"
    pool(2).run(save_large, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size > 0.95e9
    growth = max(pool(8).run(load_large, folder))
    print(f"{size / MIB:.0f} MiB on disk; a rank grew by at most {growth / MIB:.0f} MiB")
    assert growth < size / 4 + 200 * MIB
