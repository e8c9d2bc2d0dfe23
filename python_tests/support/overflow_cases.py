"""fp16 training runs in which one rank overflows at chosen steps, and what each rank observes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axonn_ext.data import Batch
from axonn_ext.optim.gradients import GradientNorm
from axonn_ext.overlap import Orchestrator
from axonn_ext.ranks.grid import Grid
from axonn_ext.train.batches import make_batches, row_group
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.corpora import load
from axonn_ext.train.job import prepare
from axonn_ext.train.metrics import EvaluationMetrics, StepMetrics
from axonn_ext.train.model import Spans, TrainedModel, build_model
from axonn_ext.train.trainer import Trainer, make_optimizer
from commands import SMALL
from grids import grid_of


@dataclass
class Seen:
    """A rank's observations of a run.

    scales: the loss scale of each step. skipped: the steps, from 1, that changed no weight.
    finite_skipped: the skipped steps in which this rank's gradients were finite before the sums.
    """

    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    finite_skipped: list[int] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    eval_losses: dict[int, float] = field(default_factory=dict)
    num_overflows: int = 0

    def step(self, metrics: StepMetrics) -> None:
        self.losses[metrics.step] = metrics.loss

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self.eval_losses[metrics.step] = metrics.eval_loss

    def close(self) -> None: ...


class Overflowing:
    """A model whose gradients overflow on one rank at some steps. ranks: step, from 1 -> rank.

    Without pipeline stages, the rank's loss is scaled so much that its gradients overflow in the
    backward pass. With stages, one element of one gradient is set to infinity.
    """

    def __init__(self, model: TrainedModel, grid: Grid, ranks: dict[int, int], seen: Seen) -> None:
        self._model, self._grid, self._ranks, self._seen = model, grid, ranks, seen
        self._before = self._weights()

    @property
    def module(self) -> nn.Module:
        return self._model.module

    @property
    def orchestrator(self) -> Orchestrator | None:
        return self._model.orchestrator

    @property
    def waited_seconds(self) -> float:
        return self._model.waited_seconds

    def forward_backward(
        self, batches: Sequence[Batch], num_labels: float, span: Spans, *, loss_scale: float = 1.0
    ) -> float:
        self.note_step()
        self._seen.scales.append(loss_scale)
        step = len(self._seen.scales)
        overflows = self._ranks.get(step) == self._grid.rank
        has_stages = self._grid.size("pipe") > 1
        scale = loss_scale * 2.0**40 if overflows and not has_stages else loss_scale
        loss = self._model.forward_backward(batches, num_labels, span, loss_scale=scale)
        if overflows and has_stages:
            pick = random.Random(step)
            grad = pick.choice([p.grad for p in self.module.parameters() if p.grad is not None])
            grad.view(-1)[pick.randrange(grad.numel())] = pick.choice([math.inf, -math.inf])
        return loss

    def note_step(self) -> None:
        """Records whether the previous step changed any weight."""
        now = self._weights()
        if self._seen.scales and torch.equal(now, self._before):
            self._seen.skipped.append(len(self._seen.scales))
        self._before = now

    def _weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])

    def evaluate(self, batches: Sequence[Batch], num_labels: float) -> float:
        return self._model.evaluate(batches, num_labels)

    def warm_up(self, batch: Batch) -> None:
        self._model.warm_up(batch)

    def finish_gradients(self, clip_norm: float, *, loss_scale: float = 1.0) -> GradientNorm:
        return self._model.finish_gradients(clip_norm, loss_scale=loss_scale)


def train_with_overflows(
    folder: Path, grid: str, ranks: dict[int, int], keys: dict[str, Any]
) -> Seen:
    """Trains on all ranks of the world; returns this rank's observations."""
    values = SMALL | {"train.dtype": "fp16"} | keys
    texts = tuple(Override(key, str(value).lower()) for key, value in values.items())
    config = load_config(None, grid=grid, overrides=texts)
    job = prepare(config, world_size=dist.get_world_size())
    its_grid, seen = grid_of(config.grid), Seen()
    inner = build_model(job, its_grid)
    model = Overflowing(inner, its_grid, ranks, seen)
    corpus = load(config, job.text, job.model.vocab_size)
    training, evaluation = make_batches(config, corpus, row_group(its_grid))
    optimizer = make_optimizer(model.module, config.optim)
    trainer = Trainer(
        job, its_grid, training=training, evaluation=evaluation, model=model, optimizer=optimizer,
        folder=folder,
    )  # fmt: skip
    trainer.run((seen,))
    model.note_step()
    assert trainer.scaler is not None
    seen.num_overflows = trainer.scaler.num_overflows
    if inner.orchestrator is not None:
        inner.orchestrator.close()
    return seen


def random_overflows(*, count: int, steps: int, world_size: int, seed: int) -> dict[int, int]:
    """Draws steps, from 2 on, and a rank for each."""
    pick = random.Random(seed)
    return {step: pick.randrange(world_size) for step in pick.sample(range(2, steps), count)}


def expected_scales(overflows: dict[int, int], *, steps: int, first: float, window: int,
                    bounds: tuple[float, float]) -> list[float]:  # fmt: skip
    """The scale of each step, as documented."""
    scales, scale, clean = [], first, 0
    for step in range(1, steps + 1):
        scales.append(scale)
        clean = 0 if step in overflows else clean + 1
        if step in overflows:
            scale = max(scale / 2, bounds[0])
        elif clean % window == 0:
            scale = min(2 * scale, bounds[1])
    return scales
