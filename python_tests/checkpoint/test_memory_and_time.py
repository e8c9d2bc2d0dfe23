"""What loading costs in memory, and what saving costs in time."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest
import torch

from axonn_ext import GridShape, checkpoint, models, sync_gradients
from axonn_ext.checkpoint import Saver
from axonn_ext.models import ModelConfig
from axonn_ext.optim import AdamW
from grids import grid_of
from limits import HANG_SECONDS
from memory import MIB, anonymous_bytes

# 1 GB with AdamW's moments: 12 bytes a parameter.
LARGE = ModelConfig(
    family="llama", vocab_size=32768, hidden_size=768, num_layers=8, num_heads=16,
    sequence_length=128, tie_embeddings=True,
)  # fmt: skip
# 50 M parameters.
MEDIUM = ModelConfig(
    family="gpt2", vocab_size=24576, hidden_size=512, num_layers=12, num_heads=8,
    sequence_length=128,
)  # fmt: skip
INTERVAL, ROUNDS = 10, 4


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


def seconds_of_blocks(folder: Path) -> dict[str, list[float]]:
    """The seconds of blocks of steps, with a save in the first of each and without, in turns."""
    model, optimizer = make(GridShape(2), MEDIUM)
    saver = Saver(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MEDIUM.vocab_size, (16, 129), generator=generator)
    found: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(1 + 2 * ROUNDS):
        saves = number % 2 == 1
        torch.distributed.barrier()
        began = time.perf_counter()
        for step in range(INTERVAL):
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            if saves and step == 0:
                saver.save(number, model=model, optimizer=optimizer)
        saver.wait()  # as the next save would
        torch.distributed.barrier()
        if number:  # the first block also allocates what stays
            found["with" if saves else "without"].append(time.perf_counter() - began)
        if number == 0:  # and so does the first save
            saver.save(1000, model=model, optimizer=optimizer)
            saver.wait()
    return found


@pytest.mark.slow
def test_a_save_every_ten_steps_costs_little(pool, tmp_path) -> None:
    seconds = pool(2).run(seconds_of_blocks, tmp_path, timeout_s=6 * HANG_SECONDS)[0]
    ratio = median(seconds["with"]) / median(seconds["without"])
    shown = {kind: [round(s / INTERVAL, 3) for s in times] for kind, times in seconds.items()}
    print(f"{MEDIUM.num_parameters():,} parameters, seconds a step {shown}: ratio {ratio:.4f}")
    assert ratio < 1.03
