"""Training that is saved on one grid and continued on another."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from axonn_ext import GridShape, checkpoint, clip_grad_norm_, models
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.optim import AdamW
from axonn_ext.overlap import Orchestrator, Overlap
from grids import grid_of
from model_cases import BATCH, LENGTH, LLAMA
from steps import compute_gradients

STEPS_BEFORE, STEPS_AFTER = 2, 5
OVERLAP = Overlap(prefetch=2, deferred=2, bucket_bytes=4096)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a job trains."""

    shape: GridShape
    layout: str = "sharded"
    config: ModelConfig = LLAMA
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    overlap: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.shape.short()} {self.layout}"


class Job:
    """A model and its optimizer on a grid; the batches depend only on the step."""

    def __init__(self, setup: Setup, *, seed: int) -> None:
        self.setup, self.grid = setup, grid_of(setup.shape)
        parallel = ParallelConfig(layout=setup.layout)
        self.model = models.build(
            setup.config, self.grid, parallel, seed=seed, dtype=setup.dtype, device=setup.device
        )
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.orchestrator = Orchestrator(self.model, OVERLAP) if setup.overlap else None

    def run(self, first: int, count: int) -> list[float]:
        """Trains steps first, first + 1, ...; returns their losses."""
        return [self._step(step) for step in range(first, first + count)]

    def _step(self, step: int) -> float:
        generator = torch.Generator().manual_seed(step)
        ids, labels = torch.randint(64, (2, BATCH, LENGTH), generator=generator)
        ids, labels = ids.to(self.setup.device), labels.to(self.setup.device)
        own = {0: ("data", "z")}
        parts = self.setup.micro_batches
        pairs = [
            (self.grid.shard(i, own), self.grid.shard(y, own))
            for i, y in zip(ids.chunk(parts), labels.chunk(parts), strict=True)
        ]
        total = compute_gradients(self.model, self.orchestrator, pairs, float(labels.numel()))
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def digests(self) -> dict[str, str]:
        """A digest of each whole tensor: weights or masters, and moments."""
        found = {}
        for p in sharded_parameters(self.model):
            (piece,) = self.optimizer.pieces_of(p.parameter)
            for key, tensor in {"value": piece.master, "low": p.parameter, **piece.state}.items():
                whole = p.whole(tensor) if tensor.dim() else tensor
                content = (
                    whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
                found[f"{p.name} {key}"] = hashlib.sha256(content).hexdigest()
        return found

    def close(self) -> None:
        if self.orchestrator is not None:
            self.orchestrator.close()


def train_and_save(setup: Setup, folder: Path) -> dict[str, Any]:
    """Trains a little, saves, and continues; returns the results that other jobs must match."""
    job = Job(setup, seed=3)
    job.run(0, STEPS_BEFORE)
    checkpoint.save(folder, model=job.model, optimizer=job.optimizer, extra={"step": STEPS_BEFORE})
    digests = job.digests()
    losses = job.run(STEPS_BEFORE, STEPS_AFTER)
    job.close()
    return {"digests": digests, "losses": losses}


def load_and_go_on(setup: Setup, folder: Path) -> dict[str, Any]:
    """Loads into a job with other weights and steps, and continues."""
    job = Job(setup, seed=4)
    job.run(7, 1)
    extra = checkpoint.load(folder, model=job.model, optimizer=job.optimizer)
    digests = job.digests()
    losses = job.run(extra["step"], STEPS_AFTER)
    job.close()
    return {"digests": digests, "losses": losses}
