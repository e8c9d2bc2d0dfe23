"""Unusual and invalid uses of ZeRO; the functions run on each rank."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axonn_ext import GridShape, full_state_dict, models, sync_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.optim import AdamW
from axonn_ext.optim.gradients import clip_sharded_, gradient_norm
from axonn_ext.optim.zero import shards_of
from axonn_ext.overlap import Orchestrator, Overlap
from axonn_ext.pipeline import Pipeline
from axonn_ext.ranks.grid import Grid
from grids import grid_of
from model_cases import GPT2


@dataclass(frozen=True)
class Usage:
    """Options of an optimizer; none of them may change a bit of the results."""

    zero: int = 0
    offload: str = "none"
    overlap: bool = False
    bucket_elements: int = 1500


def make_model(grid: Grid) -> nn.Module:
    """A model with matrices in bf16, the rest in fp32, and some frozen parameters."""
    model = models.build(GPT2, grid, ParallelConfig(), seed=3)
    for index, parameter in enumerate(model.parameters()):
        if parameter.dim() >= 2:
            parameter.data = parameter.data.bfloat16()
        parameter.requires_grad_(index % 7 != 5)
    return model


def backward(parameters: list[ShardedParameter], *, seed: int, copies_of: int) -> None:
    """Gives each parameter gradients of small multiples of 1/8, whose sums are exact in any order.

    copies_of: the rank of the data axis; ranks with the same number get the same gradients.
    """
    generator = torch.Generator().manual_seed(seed * 16 + copies_of)
    total = torch.zeros(())
    for p in parameters:
        factor = torch.randint(-4, 5, p.parameter.shape, generator=generator) / 8
        total = total + (p.parameter.float() * factor).sum()
    total.backward()


def train_at_random(shape: GridShape, usage: Usage, seed: int) -> dict[str, Tensor]:
    """Trains random steps, chosen by the seed; returns the full weights.

    Some passes leave parameters without gradients. Some steps have several passes, are skipped, or
    clip only some of the parameters.
    """
    grid = grid_of(shape)
    model, chosen = make_model(grid), random.Random(seed)
    trained = [p for p in sharded_parameters(model) if p.parameter.requires_grad]
    orchestrator = Orchestrator(model, Overlap(bucket_bytes=4096)) if usage.overlap else None
    optimizer = AdamW(
        model, lr=1e-2, zero=usage.zero, offload=usage.offload,
        bucket_elements=usage.bucket_elements,
    )  # fmt: skip
    for step in range(5):
        optimizer.zero_grad()
        passes = chosen.choice([1, 1, 2, 3])
        for number in range(passes):
            used = chosen.sample(trained, chosen.randint(1, len(trained)))
            if orchestrator is not None and number < passes - 1:
                with orchestrator.no_sync():
                    backward(used, seed=step * 4 + number, copies_of=grid.coords["data"])
            else:
                backward(used, seed=step * 4 + number, copies_of=grid.coords["data"])
        if orchestrator is None:
            sync_gradients(model)
        else:
            orchestrator.sync_gradients()
        if chosen.random() < 0.3:
            clip_sharded_(trained[::3], 1e6)  # too large to change a bit
        norm = gradient_norm(model).norm
        if chosen.random() < 0.8:
            optimizer.step(gradient_factor=0.5 if norm > 0 else 0.25)
    found = full_state_dict(model)
    optimizer.close()
    if orchestrator is not None:
        orchestrator.close()
    return found


def compare(shape: GridShape, usage: Usage, seed: int) -> list[str]:
    """Returns the parameters that differ from those of a training without any of the options."""
    ours, theirs = train_at_random(shape, usage, seed), train_at_random(shape, Usage(), seed)
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def differing_gradients(usage: Usage, missing: int | None) -> str:
    """Rank 1 of data lacks one gradient, or all of them (None); returns the error message."""
    grid = grid_of(GridShape(data=2))
    model = make_model(grid)
    trained = [p for p in sharded_parameters(model) if p.parameter.requires_grad]
    orchestrator = Orchestrator(model, Overlap()) if usage.overlap else None
    optimizer = AdamW(model, lr=1.0, zero=usage.zero, bucket_elements=usage.bucket_elements)
    if grid.coords["data"] == 1:
        trained = [p for i, p in enumerate(trained) if missing is not None and i != missing]
    try:
        if trained:
            backward(trained, seed=0, copies_of=0)
        sync_gradients(model) if orchestrator is None else orchestrator.sync_gradients()
        said = ""
    except RuntimeError as error:
        said = str(error)
    if orchestrator is not None:
        orchestrator.close()
    optimizer.close()
    return said


def sums_of_a_part(shape: GridShape) -> tuple[float, float]:
    """Norms after summing all modules at once, and after first summing one without tied weights."""
    found = []
    for part_first in (False, True):
        grid = grid_of(shape)
        model = models.build(GPT2, grid, ParallelConfig(), seed=3)
        pipeline = Pipeline(model, grid)
        optimizer = AdamW(model, lr=1.0, zero=1)
        every = list(sharded_parameters(pipeline.module))
        ends = {id(p.parameter) for p in every if p.spec.on_ends}
        assert ends
        backward(every, seed=grid.coords["pipe"], copies_of=grid.coords["data"])
        if part_first:
            part = next(
                m for m in pipeline.module.modules()
                if sum(1 for _ in m.parameters()) > 0
                and not ends & {id(p) for p in m.parameters()}
            )  # fmt: skip
            sync_gradients(part)
        sync_gradients(pipeline.module)
        found.append(gradient_norm(pipeline.module).norm.item())
        optimizer.close()
        pipeline.close()
    first, second = found
    return first, second


def orchestrator_of_a_part() -> tuple[float, float]:
    """Norms without overlap, and with an orchestrator for only one module."""
    found = []
    for overlap in (False, True):
        grid = grid_of(GridShape(x=2, data=2))
        model = models.build(GPT2, grid, ParallelConfig(), seed=3)
        part = next(
            m for m in model.modules()
            if (own := list(sharded_parameters(m)))
            and all(p.spec.summed_over == ("data",) or "x" not in p.spec.summed_over for p in own)
        )  # fmt: skip
        optimizer = AdamW(model, lr=1.0, zero=1)
        orchestrator = Orchestrator(part, Overlap()) if overlap else None
        backward(list(sharded_parameters(model)), seed=0, copies_of=grid.coords["data"])
        sync_gradients(model) if orchestrator is None else orchestrator.sync_gradients()
        found.append(gradient_norm(model).norm.item())
        if orchestrator is not None:
            orchestrator.close()
        optimizer.close()
    first, second = found
    return first, second


def life_of_an_optimizer() -> dict[str, object]:
    """The error of a step without summed gradients, and the traces of a closed optimizer."""
    grid = grid_of(GridShape(data=2))
    model = make_model(grid)
    optimizer = AdamW(model, lr=1.0, zero=1)
    trained = [p for p in sharded_parameters(model) if p.parameter.requires_grad]
    read = pickle.loads(pickle.dumps(trained[0].parameter))
    found: dict[str, object] = {
        "same": torch.equal(read, trained[0].parameter), "pickled": shards_of(read)
    }  # fmt: skip
    backward(trained, seed=0, copies_of=0)
    try:
        optimizer.step()
    except RuntimeError as error:
        found["step"] = str(error)
    optimizer.close()
    optimizer.close()
    found["left"] = [p.name for p in trained if shards_of(p.parameter) is not None]
    return found
