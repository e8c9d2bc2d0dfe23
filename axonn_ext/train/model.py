"""The model that a job trains, with one interface for a grid and for plain torch.nn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

import axonn_ext
from axonn_ext import models
from axonn_ext.data import Batch
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import Places
from axonn_ext.optim import freeze
from axonn_ext.optim.gradients import GradientNorm, clipping_factor, gradient_norm, widened
from axonn_ext.overlap import Orchestrator
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import of_all_ranks
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.optimizer import ParameterGroup, group_of
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import LoraTable
from axonn_ext.train.job import Job

if TYPE_CHECKING:
    from axonn_ext.pipeline import MicroBatch


class TrainedModel(Protocol):
    """The interface of a model that the trainer uses."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    @property
    def orchestrator(self) -> Orchestrator | None:
        """The orchestrator that overlaps communication with computation, if enabled."""
        ...

    @property
    def waited_seconds(self) -> float:
        """The seconds for which this rank has waited for messages from other pipeline stages."""
        ...

    def forward_backward(
        self, batches: Sequence[Batch], num_labels: float, span: Spans, *, loss_scale: float = 1.0
    ) -> float:
        """Adds to the gradients; returns the loss of the micro-batches, equal on all ranks.

        The loss is the sum over all ranks, divided by `num_labels`. span: wraps named parts of the
        work. loss_scale: multiplies the gradients, but not the returned loss.
        """
        ...

    def evaluate(self, batches: Sequence[Batch], num_labels: float) -> float:
        """Returns the loss without computing gradients."""
        ...

    def warm_up(self, batch: Batch) -> None:
        """Runs a step's work on one micro-batch; leaves arbitrary gradients."""
        ...

    def finish_gradients(self, clip_norm: float, *, loss_scale: float = 1.0) -> GradientNorm:
        """Completes the gradients of a step; returns their norm, and how to clip and unscale them.

        clip_norm: the maximum norm; 0: no limit. loss_scale: as passed to `forward_backward`.
        """
        ...


# Wraps a named part of a step.
Spans = Callable[[str], AbstractContextManager[None]]


class _Whole:
    """Base of models that compute one micro-batch after the other."""

    waited_seconds = 0.0

    def loss(self, batch: Batch, num_labels: float) -> Tensor:
        """Returns the sum of the losses of all ranks over `num_labels`; equal on all ranks."""
        raise NotImplementedError

    def backward(self, loss: Tensor, *, last: bool, loss_scale: float = 1.0) -> None:
        """Adds to the gradients; `last` says whether this is the last micro-batch of the step."""
        (loss * loss_scale).backward()  # passing a gradient makes torch load sympy

    def forward_backward(
        self, batches: Sequence[Batch], num_labels: float, span: Spans, *, loss_scale: float = 1.0
    ) -> float:
        losses = []
        for index, batch in enumerate(batches):
            with span("forward"):
                loss = self.loss(batch, num_labels)
            with span("backward"):
                self.backward(loss, last=index == len(batches) - 1, loss_scale=loss_scale)
            losses.append(loss.detach())
        return sum(loss.item() for loss in losses)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], num_labels: float) -> float:
        return sum(self.loss(batch, num_labels).item() for batch in batches)

    def warm_up(self, batch: Batch) -> None:
        self.backward(self.loss(batch, 1.0), last=False)


class GridModel(_Whole):
    """A model of axonn_ext on a grid."""

    def __init__(self, job: Job, grid: Grid) -> None:
        lora = job.config.lora
        self.module = _build(job, grid, dtype=job.dtype, device=job.device)
        if lora.rank:
            add_adapters(self.module, lora, seed=job.config.train.seed)
        freeze_groups(self.module, job.config.optim.groups, grid)
        overlap = job.config.overlap_options()
        self.orchestrator = None if overlap is None else Orchestrator(self.module, overlap)

    def loss(self, batch: Batch, num_labels: float) -> Tensor:
        device = next(self.module.parameters()).device
        token_ids, labels = batch.token_ids.to(device), batch.labels.to(device)
        return self.module.loss(token_ids, labels, num_labels, _places(batch, device))

    def backward(self, loss: Tensor, *, last: bool, loss_scale: float = 1.0) -> None:
        waits = self.orchestrator is not None and not last
        with self.orchestrator.no_sync() if self.orchestrator and waits else nullcontext():
            super().backward(loss, last=last, loss_scale=loss_scale)

    def finish_gradients(self, clip_norm: float, *, loss_scale: float = 1.0) -> GradientNorm:
        if self.orchestrator is None:
            axonn_ext.sync_gradients(self.module)
        else:
            self.orchestrator.sync_gradients()
            self.orchestrator.settle()  # the host is about to wait for the norm anyway
        return gradient_norm(self.module, clip_norm or math.inf, loss_scale=loss_scale)


class PipelineModel:
    """A model of axonn_ext whose blocks are split into the stages of a pipeline."""

    def __init__(self, job: Job, grid: Grid) -> None:
        from axonn_ext.pipeline import Pipeline  # imported here, as most runs have no stages

        self.module = _build(job, grid, dtype=job.dtype, device=job.device)
        freeze_groups(self.module, job.config.optim.groups, grid)
        self.pipeline = Pipeline(
            self.module, grid, job.config.pipeline, overlap=job.config.overlap_options()
        )
        self.orchestrator = self.pipeline.orchestrator
        self.waited_seconds = 0.0

    def forward_backward(
        self, batches: Sequence[Batch], num_labels: float, span: Spans, *, loss_scale: float = 1.0
    ) -> float:
        with span("forward and backward"):
            loss = self.pipeline.step(
                self._micro_batches(batches), num_labels=num_labels, loss_scale=loss_scale
            )
        self.waited_seconds += self.pipeline.stats.waited_seconds
        return loss.item()

    def evaluate(self, batches: Sequence[Batch], num_labels: float) -> float:
        return self.pipeline.evaluate(self._micro_batches(batches), num_labels=num_labels).item()

    def warm_up(self, batch: Batch) -> None:
        interleaves = self.pipeline.options.schedule == "interleaved"
        count = self.pipeline.grid.size("pipe") if interleaves else 1
        self.pipeline.step(self._micro_batches([batch] * count), num_labels=1.0)

    def finish_gradients(self, clip_norm: float, *, loss_scale: float = 1.0) -> GradientNorm:
        self.pipeline.sync_gradients()
        return gradient_norm(self.module, clip_norm or math.inf, loss_scale=loss_scale)

    def _micro_batches(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        from axonn_ext.pipeline import MicroBatch

        to = next(self.module.parameters()).device
        return [MicroBatch(b.token_ids.to(to), b.labels.to(to), _places(b, to)) for b in batches]


def _places(batch: Batch, device: torch.device) -> Places | None:
    return None if batch.documents is None else Places.packed(batch.documents.to(device))


class PlainModel(_Whole):
    """The same model in plain torch.nn, starting from the same weights."""

    orchestrator = None

    def __init__(self, job: Job, grid: Grid) -> None:
        initial = _build(job, grid)
        from axonn_ext.models.plain import PlainTransformer

        self.module = PlainTransformer(job.model)
        self.module.load_state_dict(axonn_ext.full_state_dict(initial))
        self.module.to(job.device, job.dtype)

    def loss(self, batch: Batch, num_labels: float) -> Tensor:
        device = next(self.module.parameters()).device
        return self.module.loss(batch.token_ids.to(device), batch.labels.to(device), num_labels)

    def finish_gradients(self, clip_norm: float, *, loss_scale: float = 1.0) -> GradientNorm:
        gradients = [widened(p.grad) for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).double() / loss_scale
        return GradientNorm(norm, clipping_factor(norm, clip_norm or math.inf) / loss_scale)


def _build(
    job: Job, grid: Grid, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Transformer:
    """Returns the model at the start of the run. Raises UserError for files that do not fit."""
    config = job.config
    if not config.model.pretrained:
        return models.build(
            job.model, grid, config.parallel, stages=job.stages, seed=config.train.seed,
            dtype=dtype, device=device,
        )  # fmt: skip
    # Rotary tables need not be longer than the sequences.
    length = config.model.sequence_length if job.model.traits.rotary else None
    try:
        return axonn_ext.from_pretrained(
            config.model.pretrained, grid, config.parallel, stages=job.stages, dtype=dtype,
            device=device, sequence_length=length,
        )  # fmt: skip
    except InputError as error:
        raise UserError(f"model.pretrained: {error}") from None


def add_adapters(module: Transformer, lora: LoraTable, *, seed: int) -> None:
    """Adds a run's adapters. Raises UserError if they do not fit the model."""
    targets = [name.strip() for name in lora.targets.split(",")]
    try:
        if lora.start:
            axonn_ext.load_adapter(module, lora.start)
        else:
            axonn_ext.add_adapters(
                module, rank=lora.rank, alpha=lora.alpha, targets=targets, seed=seed
            )
    except ValueError as error:
        raise UserError(f"lora.{'start' if lora.start else 'targets'}: {error}") from None
    from axonn_ext.models.pretrained import adapters_of

    ranks = {adapter.rank for _, adapter in adapters_of(module)}
    if ranks != {lora.rank}:
        raise UserError(f"lora.rank: expected {max(ranks)}, as in {lora.start}, got {lora.rank}")


def freeze_groups(module: Transformer, groups: Sequence[ParameterGroup], grid: Grid) -> None:
    """Freezes the parameters of frozen groups.

    Collectives, if there are groups and stages: two all-gathers over pipe. Raises UserError, on all
    ranks, if a pattern matches no parameter, or if nothing is left to train.
    """
    if not groups:
        return
    names = [name for name, _ in module.named_parameters()]
    if grid.size("pipe") > 1:
        names = [name for stage in of_all_ranks(names, grid.group("pipe")) for name in stage]
    numbers = {name: group_of(name, groups) for name in names}
    for number, group in enumerate(groups):
        place = f"optim.groups[{number}].names"
        for pattern in group.patterns:
            if not any(ParameterGroup(pattern).matches(name) for name in names):
                known = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
                raise UserError(
                    f"{place}: expected patterns that match parameters of this model, got "
                    f"{pattern}; its parameters are {', '.join(known)}"
                )
        if number not in numbers.values():
            raise UserError(
                f"{place}: expected parameters that no earlier group has, got {group.names}, which "
                "matches only others"
            )
    if all(number >= 0 and groups[number].frozen for number in numbers.values()):
        raise UserError("optim.groups: expected parameters that train, got groups that freeze all")
    freeze(module, groups)


def build_model(job: Job, grid: Grid) -> TrainedModel:
    """Returns the model with its initial weights, the same on every grid and in plain torch.nn."""
    if job.config.model.implementation == "plain":
        return PlainModel(job, grid)
    model = PipelineModel(job, grid) if grid.size("pipe") > 1 else GridModel(job, grid)
    if job.config.train.compile:
        model.module.compile_blocks()
    return model
