"""Small models on pipelines, compared with one process of plain PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from axonn_ext import (
    GridShape,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    models,
)
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.pipeline import MicroBatch, Pipeline, PipelineOptions
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.stages import Stages
from grids import grid_of
from model_cases import CONFIGS

MICRO_BATCHES, SEQUENCES, LENGTH, MAX_NORM = 4, 4, 8, 0.05
OPTIONS: Mapping[str, PipelineOptions] = {
    "message_driven": PipelineOptions(),
    "message_driven, whole backward": PipelineOptions(defer_weights=False),
    "at most some bytes later": PipelineOptions(deferred_bytes=60_000),
    "1f1b": PipelineOptions("1f1b"),
    "gpipe": PipelineOptions("gpipe"),
    "zero_bubble": PipelineOptions("zero_bubble"),
    "interleaved": PipelineOptions("interleaved", chunks=2),
}


def config_of(name: str, layers: int) -> ModelConfig:
    return dataclasses.replace(CONFIGS[name], num_layers=layers)


def batches(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [micro-batches, B, S]; random labels are missing."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MICRO_BATCHES, SEQUENCES, LENGTH)
    ids = torch.randint(64, shape, generator=generator)
    labels = torch.randint(64, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.25] = -100
    labels[1, 0] = -100
    return ids, labels


def own_batches(grid: Grid, seed: int = 5) -> list[MicroBatch]:
    """The micro-batches of this rank's (data, z) group."""
    own = {0: ("data", "z")}
    return [MicroBatch(grid.shard(ids, own), grid.shard(labels, own))
            for ids, labels in zip(*batches(seed), strict=True)]  # fmt: skip


def reference(config: ModelConfig, state: dict[str, torch.Tensor], steps: int) -> dict[str, Any]:
    """Losses, norm and clipped gradients of `steps` steps, whose gradients accumulate."""
    model = PlainTransformer(config).double()
    model.load_state_dict(state)
    losses = []
    for step in range(steps):
        ids, labels = batches(5 + step)
        loss = model.loss(ids.flatten(0, 1), labels.flatten(0, 1))
        loss.backward()
        losses.append(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return {"loss": torch.stack(losses), "norm": norm, **grads}


def make(
    config: ModelConfig, shape: GridShape, options: PipelineOptions, parallel: ParallelConfig
) -> models.Transformer:
    grid = grid_of(shape)
    stages = Stages.balanced(config, shape.pipe, options.chunks)
    return models.build(config, grid, parallel, seed=2, dtype=torch.float64, stages=stages)


def errors(
    config: ModelConfig, shape: GridShape, options: PipelineOptions,
    parallel: ParallelConfig | None = None, overlap: Overlap | None = None, steps: int = 1,
) -> dict[str, float]:  # fmt: skip
    """Relative errors of the losses, the norm, every clipped gradient, and an evaluation."""
    model = make(config, shape, options, parallel or ParallelConfig())
    want = reference(config, full_state_dict(model), steps)
    with Pipeline(model, model.grid, options, overlap=overlap) as pipeline:
        losses = []
        for step in range(steps):
            losses.append(pipeline.step(own_batches(model.grid, 5 + step)))
        pipeline.sync_gradients()
        norm = clip_grad_norm_(pipeline.module, MAX_NORM)
        evaluated = pipeline.evaluate(own_batches(model.grid))
    got = {"loss": torch.stack(losses), "norm": norm, **full_gradients(model)}
    assert got.keys() == want.keys()
    scale = {name: want[name.replace("k_proj.bias", "q_proj.bias")] for name in want}
    found = {n: ((got[n] - want[n]).norm() / scale[n].norm()).item() for n in want}
    found["evaluation"] = abs(evaluated - want["loss"][0]).item()
    return found


def failures(
    name: str, layers: int, shapes: Sequence[GridShape], options: Sequence[str],
    parallel: ParallelConfig | None = None, overlap: Overlap | None = None, steps: int = 1,
) -> list[str]:  # fmt: skip
    """Values that differ by more than 1e-11 from one process; in fp64, not due to rounding."""
    config, found = config_of(name, layers), []
    for shape in shapes:
        for label in options:
            chosen = OPTIONS[label]
            too_many = layers < shape.pipe * chosen.chunks or MICRO_BATCHES % shape.pipe
            if chosen.schedule == "interleaved" and too_many:
                continue
            found += [
                f"{name} {layers} {shape.short()} {label}: {what} {error:.1e}"
                for what, error in errors(config, shape, chosen, parallel, overlap, steps).items()
                if not error < 1e-11
            ]
    return found


def frozen_errors(options: PipelineOptions, frozen: Sequence[int]) -> dict[str, float]:
    """Relative errors of the loss and the remaining gradients if some stages are frozen."""
    model = make(config_of("gpt2-untied", 5), GridShape(pipe=4), options, ParallelConfig())
    want = reference(model.config, full_state_dict(model), 1)
    if model.grid.coords["pipe"] in frozen:
        model.requires_grad_(False)
    with Pipeline(model, model.grid, options) as pipeline:
        loss = pipeline.step(own_batches(model.grid))
        pipeline.sync_gradients()
        clip_grad_norm_(pipeline.module, math.inf)
    # The reference's gradients are clipped; torch adds 1e-6 to their norm.
    got, scale = full_gradients(model), max(1.0, (want["norm"].item() + 1e-6) / MAX_NORM)
    found = {n: ((g / scale - want[n]).norm() / want[n].norm()).item() for n, g in got.items()}
    return {"loss": abs(loss - want["loss"][0]).item(), **found}


def state_is_kept(name: str, shape: GridShape, chunks: int) -> bool:
    """Whether every stage returns the full state that was changed and loaded."""
    options = PipelineOptions("interleaved", chunks=chunks) if chunks > 1 else PipelineOptions()
    config = config_of(name, 4)
    model = make(config, shape, options, ParallelConfig())
    plain = PlainTransformer(config).double()
    state = full_state_dict(model)
    plain.load_state_dict(state)  # strict: no name is missing or unknown
    changed = {n: p.detach() + 1 for n, p in plain.named_parameters(remove_duplicate=False)}
    load_full_state_dict(model, changed)
    state = full_state_dict(model)
    return state.keys() == changed.keys() and all(torch.equal(state[n], changed[n]) for n in state)
