"""Adds low-rank adapters (LoRA) to a model, and merges them into its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from axonn_ext.models.stored import Stored
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import Adapter, Linear, Target, initialize
from axonn_ext.spec.files.errors import first_of

ALL_LINEAR = "all-linear"


def add_adapters(
    model: Transformer,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] | str = (ALL_LINEAR,),
    seed: int = 0,
) -> list[str]:
    """Adds adapters to Linears of the blocks, and freezes all other parameters.

    targets: names of Linears in Hugging Face's model, or suffixes of them, such as q_proj or
    mlp.c_proj; or "all-linear" for all Linears of the blocks, as in PEFT. Returns all full names.
    Initial values depend only on the seed and the names, so they are the same on every grid. No
    collectives.

    Raises ValueError for a rank below 1 or above the hidden size, an unknown target, a model that
    already has adapters, heads_over_y, q, k and v of heads that ranks of x share, or several
    pipeline stages.
    """
    model.grid.shape.refuse_pipe("add_adapters")
    largest = model.config.hidden_size
    if type(rank) is not int or not 1 <= rank <= largest:
        raise ValueError(
            f"add_adapters: rank must be a whole number from 1 to {largest}, got {rank}"
        )
    if not math.isfinite(alpha):
        raise ValueError(f"add_adapters: alpha must be a finite number, got {alpha}")
    targets = [targets] if isinstance(targets, str) else targets
    if adapters_of(model):
        raise ValueError("add_adapters: the model has adapters; merge them first")
    found = {name: _targets_of(model, name) for name, _ in _linears(model)}
    every = [target for each in found.values() for target in each]
    unknown = [t for t in targets if t != ALL_LINEAR and not any(_is(each, t) for each in every)]
    if unknown or not targets:
        known = sorted({target.short_name for target in every})
        raise ValueError(
            f"add_adapters: targets must be {ALL_LINEAR}, or some of {', '.join(known)}, "
            f"got {first_of(unknown) if unknown else 'none'}"
        )
    made = []
    for name, linear in _linears(model):
        wanted = [t for t in found[name] if any(_is(t, target) for target in targets)]
        if wanted:
            stored = model.stored(f"{name}.weight")
            placed = [_placed(target, stored, linear) for target in wanted]
            adapter = Adapter(linear, placed, rank=rank, alpha=alpha)
            initialize(adapter, seed=seed, prefix=f"{name}.adapter")
            made.append((linear, adapter))
    model.requires_grad_(False)
    for linear, adapter in made:
        linear.adapter = adapter
    return [target.name for _, adapter in adapters_of(model) for target in adapter.targets]


def _is(target: Target, wanted: str) -> bool:
    return wanted == ALL_LINEAR or f".{target.name}".endswith(f".{wanted}")


def target_names(model: Transformer) -> list[str]:
    """Returns the full names of all Linears that can be targets, with or without adapters."""
    found = (_targets_of(model, name) for name, _ in _linears(model))
    return [target.name for targets in found for target in targets]


def adapters_of(model: Transformer) -> list[tuple[Linear, Adapter]]:
    """Returns the Linears with adapters, and these adapters."""
    linears = (linear for _, linear in _linears(model))
    return [(linear, linear.adapter) for linear in linears if linear.adapter is not None]


@torch.no_grad()
def merge_adapters(model: Transformer) -> None:
    """Adds the updates to the weights, and removes the adapters. All parameters train again.

    The sum is computed in fp32 (fp64 for fp64) and rounded to the dtype of the weight. No
    collectives.
    """
    for linear, adapter in adapters_of(model):
        update = adapter.weight_update()
        rows = linear.weight.shape[0]
        own = update.narrow(0, linear.grid.axis("z").rank * rows, rows)
        linear.weight.copy_(linear.weight.to(own.dtype) + own)
    remove_adapters(model)


def remove_adapters(model: Transformer) -> None:
    """Removes all adapters without merging them. All parameters train again."""
    for linear, _ in adapters_of(model):
        linear.adapter = None
    model.requires_grad_(True)


def _linears(model: Transformer) -> Iterator[tuple[str, Linear]]:
    """Yields the Linears of the blocks, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith("blocks."):
            yield name, module


def _targets_of(model: Transformer, name: str) -> list[Target]:
    """Returns the possible targets: the Linears of Hugging Face's model in this Linear."""
    stored = model.stored(f"{name}.weight")
    found, first = [], 0
    for public, rows in stored.parts:
        order = None
        if stored.order is not None:
            own = stored.order[(stored.order >= first) & (stored.order < first + rows)] - first
            order = None if torch.equal(own, torch.arange(rows)) else own
        found.append(Target(public.removesuffix(".weight"), rows, order=order))
        first += rows
    return found


def _placed(target: Target, stored: Stored, linear: Linear) -> Target:
    """Returns the target with its columns of this rank's output, if it is a part of the Linear.

    The columns keep their order within each part, and each rank has the same number. Raises
    ValueError if this is impossible because ranks of x share a key-value head.
    """
    if len(stored.parts) == 1:
        return target
    assert stored.order is not None
    number = stored.names.index(f"{target.name}.weight")
    axis = linear.grid.axis("x" if linear.role == "expand" else "y")
    first = sum(count for _, count in stored.parts[:number])
    inside = (stored.order >= first) & (stored.order < first + target.size)
    of_ranks = inside.view(axis.size, -1)
    if not bool((of_ranks.sum(1) * axis.size == target.size).all()):
        raise ValueError(
            f"add_adapters: {target.short_name} needs an x that divides the key-value heads, got "
            f"x={axis.size}"
        )
    return dataclasses.replace(target, columns=of_ranks[axis.rank].nonzero().flatten())
