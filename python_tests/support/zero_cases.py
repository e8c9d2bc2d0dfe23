"""Training with ZeRO, compared with the same training without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axonn_ext import (
    Grid,
    GridShape,
    checkpoint,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    gradient_norm,
    models,
)
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.pretrained import add_adapters
from axonn_ext.optim import AdamW, ParameterGroup, freeze
from axonn_ext.optim.muon import Muon
from axonn_ext.overlap import Orchestrator, Overlap
from axonn_ext.pipeline import MicroBatch, Pipeline
from grids import grid_of
from model_cases import GPT2, random_batch
from steps import compute_gradients

# fp32: sums of two or four numbers in another order differ by a few units in the last place. AdamW
# then divides small gradients by the roots of their squares, which can magnify that. bf16 gradients
# are rounded to 2**-9 at each sum over micro-batches or ranks, fp16 gradients to 2**-12. ZeRO and
# its reference round different partial sums: three each, of up to twice the total's size, because
# the gradients of up to four parts partly cancel.
ROUNDINGS = 2 * 3**0.5 * 2
CLOSE = {torch.float32: 1e-5, torch.bfloat16: ROUNDINGS / 2**9, torch.float16: ROUNDINGS / 2**12}
# AdamW's first steps move each weight by about the learning rate, whatever the size of its
# gradient. If the error of gradients is a fraction d of their root mean square, about a fraction d
# of them may have the wrong sign. Updates, and vectors that started at zero, then differ by up to
# the square root of d.
CLOSE_WEIGHTS = {dtype: d if dtype == torch.float32 else d**0.5 for dtype, d in CLOSE.items()}

STEPS = 4
GROUPS = (
    ParameterGroup("blocks.*.norm_*", weight_decay=0.3),
    ParameterGroup("blocks.0.mlp.*", frozen=True),
    ParameterGroup("*.qkv.*, embedding.*", lr_factor=0.5),
)
OVERLAP = Overlap(prefetch=2, deferred=2, bucket_bytes=4096)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a job trains.

    bucket_elements: small enough to split parameters. adapters: train only low-rank adapters.
    groups: some parameters have other options, and some are frozen.
    """

    shape: GridShape
    zero: int = 0
    offload: str = "none"
    config: ModelConfig = GPT2
    layout: str = "sharded"
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    overlap: bool = False
    recompute: str = "none"
    adapters: bool = False
    groups: bool = False
    ema: float = 0.0
    bucket_elements: int = 1500
    device: str = "cpu"
    muon: bool = False

    def without(self) -> Setup:
        """The same, with whole gradients and states on every rank."""
        return dataclasses.replace(self, zero=0, offload="none")

    @property
    def loss_scale(self) -> float:
        """Without a scale, most fp16 gradients would be small multiples of its smallest number."""
        return 2.0**12 if self.dtype == torch.float16 else 1.0

    def __str__(self) -> str:
        parts = [self.shape.short(), self.config.family, f"zero={self.zero}", self.offload]
        parts += [str(self.dtype).removeprefix("torch."), self.layout]
        parts += ["overlap"] * self.overlap + ["muon"] * self.muon + [f"{self.micro_batches} parts"]
        return " ".join(parts)


class Job:
    """A model and its optimizer on a grid."""

    def __init__(self, setup: Setup, *, seed: int = 3) -> None:
        self.setup, self.grid = setup, grid_of(setup.shape)
        parallel = ParallelConfig(layout=setup.layout, recompute=setup.recompute)
        self.model = models.build(
            setup.config, self.grid, parallel, seed=seed, dtype=setup.dtype, device=setup.device
        )  # fmt: skip
        if setup.adapters:
            add_adapters(self.model, rank=3, alpha=6.0, targets=["all-linear"], seed=4)
        groups = GROUPS if setup.groups else ()
        freeze(self.model, groups)
        overlap = OVERLAP if setup.overlap else None
        self.pipeline: Pipeline | None = None
        self.orchestrator: Orchestrator | None = None
        if setup.shape.pipe > 1:
            self.pipeline = Pipeline(self.model, self.grid, overlap=overlap)
        elif overlap is not None:
            self.orchestrator = Orchestrator(self.model, overlap)
        self.optimizer = self._optimizer(setup, groups)

    def _optimizer(self, setup: Setup, groups: Sequence[ParameterGroup]) -> AdamW:
        if setup.muon:
            return Muon(
                self.model, matrices=self.model.hidden_matrices(), lr=1e-2, zero=setup.zero,
                bucket_elements=setup.bucket_elements, groups=groups, ema_decay=setup.ema,
            )  # fmt: skip
        return AdamW(
            self.model, lr=1e-2, zero=setup.zero, offload=setup.offload,
            bucket_elements=setup.bucket_elements, groups=groups, ema_decay=setup.ema,
        )  # fmt: skip

    def run(self, first: int, count: int) -> list[tuple[float, float]]:
        """Trains steps first, first + 1, ...; returns their losses and norms."""
        return [self._step(step) for step in range(first, first + count)]

    def gradients(self, step: int) -> float:
        """Computes the whole gradients of a step, times the loss scale; returns its loss."""
        ids, labels = (tensor.to(self.setup.device) for tensor in random_batch())
        ids = (ids + step) % 64
        scale = self.setup.loss_scale
        count = float((labels != -100).sum()) / scale
        own = {0: ("data", "z")}
        parts = self.setup.micro_batches
        pairs = [
            (self.grid.shard(i, own), self.grid.shard(y, own))
            for i, y in zip(ids.chunk(parts), labels.chunk(parts), strict=True)
        ]
        if self.pipeline is not None:
            batches = [MicroBatch(i, y) for i, y in pairs]
            loss = self.pipeline.step(batches, num_labels=count).item()
            self.pipeline.sync_gradients()
            return loss / scale
        return compute_gradients(self.model, self.orchestrator, pairs, count) / scale

    def _step(self, step: int) -> tuple[float, float]:
        loss = self.gradients(step)
        if self.setup.loss_scale == 1:
            norm, factor = clip_grad_norm_(self.model, 0.05).item(), 1.0
        else:
            found = gradient_norm(self.model, 0.05, loss_scale=self.setup.loss_scale)
            norm, factor = found.norm.item(), found.factor.item()
        self.optimizer.step(gradient_factor=factor)
        self.optimizer.zero_grad()
        return loss, norm

    def state_bytes(self) -> int:
        """The bytes of the moments, and of the masters that are copies."""
        found = 0
        for piece in self.optimizer.pieces:
            masters = [] if piece.master is piece.parameter else [piece.master]
            moments = [t for name, t in piece.state.items() if name != "step"]
            found += sum(t.nbytes for t in (*moments, *masters))
        return found

    def close(self) -> None:
        self.optimizer.close()
        if self.pipeline is not None:
            self.pipeline.close()
        if self.orchestrator is not None:
            self.orchestrator.close()


def with_muon(setup: Setup) -> Setup:
    """The same, with Muon for the matrices of blocks."""
    return dataclasses.replace(setup, muon=True)


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[n] - theirs[n]).double().norm() / theirs[n].double().norm().clamp_min(1e-12)).item()
        for n in ours
    )


def compare(setup: Setup) -> dict[str, Any]:
    """Trains with ZeRO and without; returns the relative differences."""
    ours, theirs = Job(setup), Job(setup.without())
    found: dict[str, Any] = {}
    for job in (ours, theirs):
        job.gradients(7)
    found["gradients"] = _difference(full_gradients(ours.model), full_gradients(theirs.model))
    found["left"] = sum(p.grad is not None for p in ours.model.parameters())
    for job in (ours, theirs):
        if job.pipeline is None and job.orchestrator is None:  # gradients without a sum
            rows = (job.grid.shard(t.to(setup.device), {0: ("data", "z")}) for t in random_batch())
            job.model.loss(*rows, 1.0).backward()
        job.optimizer.zero_grad()
    pairs = zip(ours.run(0, STEPS), theirs.run(0, STEPS), strict=True)
    found["metrics"] = max(
        abs(a - b) / b for one, other in pairs for a, b in zip(one, other, strict=True)
    )
    found["weights"] = _difference(full_state_dict(ours.model), full_state_dict(theirs.model))
    found["state"] = ours.state_bytes() / theirs.state_bytes()
    for job in (ours, theirs):
        job.close()
    return found


def save(setup: Setup, folder: Path) -> list[tuple[float, float]]:
    """Trains a little, saves, and continues; returns the metrics after saving."""
    job = Job(setup)
    job.run(0, 2)
    checkpoint.save(folder, model=job.model, optimizer=job.optimizer)
    found = job.run(2, STEPS)
    job.close()
    return found


def load(setup: Setup, folder: Path) -> list[tuple[float, float]]:
    """Loads into a job with other weights and steps, and continues."""
    job = Job(setup, seed=9)
    job.run(5, 1)
    checkpoint.load(folder, model=job.model, optimizer=job.optimizer)
    found = job.run(2, STEPS)
    job.close()
    return found


def refusals() -> list[str]:
    """The error messages for invalid uses of ZeRO."""
    grid: Grid = grid_of(GridShape(pipe=2, data=2))
    model = models.build(GPT2, grid, ParallelConfig(), seed=0)
    found = []
    for make in (
        lambda: AdamW(model, lr=1.0, zero=2),
        lambda: AdamW(model.parameters(), lr=1.0, zero=1),
        lambda: [AdamW(model, lr=1.0, zero=1) for _ in range(2)],
        lambda: AdamW(model, lr=1.0, zero=3),
    ):
        try:
            make()
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found
