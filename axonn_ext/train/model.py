"""The model that a job trains, with one interface for a grid and for plain torch.nn."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

import axonn_ext
from axonn_ext import models
from axonn_ext.grid import Grid
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.overlap import Orchestrator
from axonn_ext.train.job import Job


class TrainedModel(Protocol):
    """The interface of a model that the trainer uses."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    def loss(self, token_ids: Tensor, labels: Tensor, num_labels: float) -> Tensor:
        """Returns the sum of all ranks' losses, divided by `num_labels`; equal on all ranks."""
        ...

    @property
    def orchestrator(self) -> Orchestrator | None:
        """The orchestrator that overlaps communication with computation, if that was asked for."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds to the gradients; `last` says whether this is the last micro-batch of the step."""
        ...

    def finish_gradients(self, clip_norm: float) -> float:
        """Completes and clips the gradients of a step (0: no clipping); returns their norm."""
        ...


class GridModel:
    """A model of axonn_ext on a grid."""

    def __init__(self, job: Job, grid: Grid) -> None:
        train = job.config.train
        self.module = models.build(
            job.model, grid, job.parallel, seed=train.seed, dtype=job.dtype,
            device=job.device,
        )  # fmt: skip
        overlap = job.config.overlap_options()
        self.orchestrator = None if overlap is None else Orchestrator(self.module, overlap)

    def loss(self, token_ids: Tensor, labels: Tensor, num_labels: float) -> Tensor:
        device = next(self.module.parameters()).device
        return self.module.loss(token_ids.to(device), labels.to(device), num_labels)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if self.orchestrator is None or last:
            loss.backward()
        else:
            with self.orchestrator.no_sync():
                loss.backward()

    def finish_gradients(self, clip_norm: float) -> float:
        if self.orchestrator is None:
            axonn_ext.sync_gradients(self.module)
        else:
            self.orchestrator.sync_gradients()
            self.orchestrator.settle()  # the host is about to wait for the norm anyway
        return float(axonn_ext.clip_grad_norm_(self.module, clip_norm or math.inf))


class PlainModel:
    """The same model in plain torch.nn, starting from the same weights."""

    orchestrator = None

    def __init__(self, job: Job, grid: Grid) -> None:
        train = job.config.train
        initial = models.build(job.model, grid, job.parallel, seed=train.seed)
        self.module = PlainTransformer(job.model)
        self.module.load_state_dict(axonn_ext.full_state_dict(initial))
        self.module.to(job.device, job.dtype)

    def loss(self, token_ids: Tensor, labels: Tensor, num_labels: float) -> Tensor:
        device = next(self.module.parameters()).device
        return self.module.loss(token_ids.to(device), labels.to(device), num_labels)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def finish_gradients(self, clip_norm: float) -> float:
        parameters = list(self.module.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if clip_norm and norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        return float(norm)


def build_model(job: Job, grid: Grid) -> TrainedModel:
    """Returns the model with its initial weights, which are the same on every grid and in plain."""
    if job.config.model.implementation == "plain":
        return PlainModel(job, grid)
    return GridModel(job, grid)
