"""Training steps with overlap, with immediate waits, and without overlap, compared bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from axonn_ext import Grid, GridShape, clip_grad_norm_, models, sync_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.nn import Linear
from axonn_ext.overlap import CommunicationError, Orchestrator, Overlap
from grids import grid_of, relative_error
from model_cases import GPT2, random_batch

STEPS = 3
SHARDED = ParallelConfig()
ON = Overlap(prefetch=2, deferred=2, bucket_bytes=4096)


@dataclasses.dataclass(frozen=True)
class Case:
    config: models.ModelConfig = GPT2
    parallel: ParallelConfig = SHARDED
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    device: str = "cpu"
    communicators: str = "auto"


def train(
    grid: Grid, case: Case, overlap: Overlap | None, *, wait_at_once: bool = False
) -> dict[str, Tensor]:
    """Losses, norms and weights of a few steps of plain gradient descent.

    wait_at_once: wait for every collective as soon as it starts, so that nothing overlaps.
    """
    model = models.build(case.config, grid, case.parallel, seed=2, dtype=case.dtype)
    model.to(case.device)
    orchestrator = None if overlap is None else Orchestrator(model, overlap)
    if orchestrator is not None:
        orchestrator.set_wait_at_once(wait_at_once)
    record: dict[str, Tensor] = {}
    for step in range(STEPS):
        total = backward(model, grid, case, orchestrator)
        sync_gradients(model) if orchestrator is None else orchestrator.sync_gradients()
        record |= {f"{step} {n}.grad": p.grad.clone() for n, p in model.named_parameters()}
        record |= {f"loss {step}": total, f"norm {step}": clip_grad_norm_(model, 0.5)}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    record |= {name: p.detach().clone() for name, p in model.named_parameters()}
    if orchestrator is not None:
        orchestrator.close()
    return record


def backward(model: Any, grid: Grid, case: Case, orchestrator: Orchestrator | None) -> Tensor:
    """Runs forward and backward of all micro-batches of a step; returns the loss."""
    ids, labels = (grid.shard(t, {0: ("data", "z")}).to(case.device) for t in random_batch())
    num_labels = float((random_batch()[1] != -100).sum())
    total = torch.zeros((), dtype=case.dtype, device=case.device)
    parts = list(zip(ids.chunk(case.micro_batches), labels.chunk(case.micro_batches), strict=True))
    for index, part in enumerate(parts):
        loss = model.loss(*part, num_labels)
        if orchestrator is not None and index < len(parts) - 1:
            with orchestrator.no_sync():
                loss.backward()
        else:
            loss.backward()
        total += loss.detach()
    return total


def compare(shape: GridShape, case: Case) -> tuple[list[str], float]:
    """Values that waiting at once changes in any bit, and the largest error against no overlap."""
    grid = grid_of(shape)
    overlap = dataclasses.replace(ON, communicators=case.communicators)
    on, off = (train(grid, case, overlap, wait_at_once=at_once) for at_once in (False, True))
    without = train(grid, case, None)
    assert on.keys() == off.keys() == without.keys()
    differing = [name for name in on if not torch.equal(on[name], off[name])]
    return differing, max(relative_error(on[name], without[name]) for name in on)


LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.2}


def diverge_on(device: str, shape: GridShape) -> tuple[str, str]:
    """The errors of a step in which ranks of data issue different sums, and of the next step."""
    grid = grid_of(shape)
    run = Orchestrator(linear(grid, "a").to(device))
    lane, what = run._lanes["data"], f"something of {grid.coords['data']}"
    errors = []
    for _ in range(2):
        try:
            lane.all_reduce(torch.ones(3, device=device), what).wait()
            lane.start_check()
            errors.append("")
        except CommunicationError as error:
            errors.append(str(error))
    return errors[0], errors[1]


def linear(grid: Any, name: str) -> torch.nn.Module:
    return Linear(16, 16, grid=grid, role="expand", name=name, layout="replicated")
