"""The model that a job trains, on a grid or in plain torch.nn, behind one interface."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

import axonn_ext
from axonn_ext import models
from axonn_ext.grid import Grid
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.train.job import Job

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TrainedModel(Protocol):
    """What the trainer asks of a model."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    def loss(self, token_ids: Tensor, labels: Tensor, num_labels: float) -> Tensor:
        """The global mean loss, equal on every rank, its sum divided by `num_labels`."""
        ...

    def finish_gradients(self, clip_norm: float) -> float:
        """Completes and clips the gradients of a step (0: no clipping); returns their norm."""
        ...


class GridModel:
    """A model of axonn_ext on a grid."""

    def __init__(self, job: Job, grid: Grid) -> None:
        train = job.config.train
        self.module = models.build(
            job.model, grid, job.parallel, seed=train.seed, dtype=DTYPES[train.dtype]
        )

    def loss(self, token_ids: Tensor, labels: Tensor, num_labels: float) -> Tensor:
        return self.module.loss(token_ids, labels, num_labels)

    def finish_gradients(self, clip_norm: float) -> float:
        axonn_ext.sync_gradients(self.module)
        return float(axonn_ext.clip_grad_norm_(self.module, clip_norm or math.inf))


class PlainModel:
    """The same model in plain torch.nn, starting from the same weights."""

    def __init__(self, job: Job, grid: Grid) -> None:
        train = job.config.train
        initial = models.build(job.model, grid, job.parallel, seed=train.seed)
        self.module = PlainTransformer(job.model)
        self.module.load_state_dict(axonn_ext.full_state_dict(initial))
        self.module.to(DTYPES[train.dtype])

    def loss(self, token_ids: Tensor, labels: Tensor, num_labels: float) -> Tensor:
        return self.module.loss(token_ids, labels, num_labels)

    def finish_gradients(self, clip_norm: float) -> float:
        return float(
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip_norm or math.inf)
        )


def build_model(job: Job, grid: Grid) -> TrainedModel:
    """The model with its initial weights, which are the same on every grid and in plain."""
    if job.config.model.implementation == "plain":
        return PlainModel(job, grid)
    return GridModel(job, grid)
