"""The divisibility rules that decide which model runs on which grid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig

# The most rows of attention with a window, or capped scores, that are computed at a time.
ATTENTION_ROWS = 512


class BrokenRule(NamedTuple):
    """A rule that a model breaks: `value`, the size of `what`, is not divisible by `parts`.

    `parts` is the product of the sizes of the `axes`.
    """

    what: str
    value: int
    axes: tuple[str, ...]
    parts: int
    grid: GridShape

    def __str__(self) -> str:
        sizes = " * ".join(f"{axis}={getattr(self.grid, axis)}" for axis in self.axes)
        return f"{self.what}: {self.value} must be divisible by {self.parts} ({sizes})"


def ranks_of_a_kv_head(num_heads: int, num_kv_heads: int, parts: int) -> int:
    """Returns how many of `parts` ranks compute with the same key-value head.

    1: the ranks divide the key-value heads. More: these divide the ranks, which divide the heads.
    0: neither, so a rank cannot have whole heads.
    """
    if num_kv_heads % parts == 0:
        return 1
    return parts // num_kv_heads if parts % num_kv_heads == num_heads % parts == 0 else 0


def broken_rules(
    model: ModelConfig, parallel: ParallelConfig, grid: GridShape, batch_size: int,
    *, shared_heads: bool = True,
) -> Iterator[BrokenRule]:  # fmt: skip
    """Yields every rule that is broken; nothing if the model runs.

    batch_size: the sequences of one micro-batch over all data and z coordinates. shared_heads:
    whether several ranks of x may share a key-value head. The rules are exact: a model that
    satisfies all of them runs, any other raises an error (docs/architecture.md lists the rules).
    """
    for what, value, axes in _rules(model, parallel, grid, batch_size, shared_heads):
        parts = 1
        for axis in axes:
            parts *= getattr(grid, axis)
        if value % parts:
            yield BrokenRule(what, value, axes, parts, grid)


def _rules(
    model: ModelConfig, parallel: ParallelConfig, grid: GridShape, batch_size: int,
    shared_heads: bool,
) -> Iterator[tuple[str, int, tuple[str, ...]]]:  # fmt: skip
    """Yields a description of each size that must be divisible, the size, and the axes."""
    sharded, tokens = parallel.sharded, batch_size * model.sequence_length
    over_y = sharded and not parallel.heads_over_y
    yield _SEQUENCES, batch_size, ("data", "z", "y") if over_y else ("data", "z")
    groups = "num_heads" if model.kv_heads == model.num_heads else "num_kv_heads"
    shares = shared_heads and not parallel.heads_over_y and model.traits.qk_norm != "all"
    if not shares:
        yield groups, model.kv_heads, ("x", "y") if parallel.heads_over_y else ("x",)
    elif not ranks_of_a_kv_head(model.num_heads, model.kv_heads, grid.x):
        if grid.x % model.kv_heads == 0:  # ranks could share these, if the heads were divisible
            yield "num_heads", model.num_heads, ("x",)
        else:
            yield groups, model.kv_heads, ("x",)
    yield "hidden_size", model.hidden_size, ("y", "z")
    yield "qkv features", model.qkv_size, ("x", "z")
    yield "intermediate_size", model.mlp_size, ("x",)
    yield "up features", model.up_size, ("x", "z")
    if sharded:
        yield "tokens of a micro-batch (residual rows)", tokens, ("data", "z", "x")
        yield "tokens of a micro-batch (MLP rows)", tokens, ("data", "z", "y")


def check(
    config: ModelConfig, parallel: ParallelConfig, grid: GridShape, *, batch_size: int,
    pretrained: bool = False,
) -> list[str]:  # fmt: skip
    """Returns every broken rule with its numbers and a remedy; an empty list if the model runs.

    batch_size: the sequences of one micro-batch over all data and z coordinates. pretrained: the
    sizes of the model cannot change, so that no remedy names them.
    """
    rules = broken_rules(config, parallel, grid, batch_size)
    return [_advice(rule, config, pretrained) for rule in rules]


_SEQUENCES = "sequences of a micro-batch"
_SIZES = ("num_kv_heads", "num_heads", "hidden_size", "intermediate_size")  # those of the config


def _advice(rule: BrokenRule, config: ModelConfig, pretrained: bool) -> str:
    enough = math.ceil(rule.value / rule.parts) * rule.parts
    remedies = [f"{rule}: change the grid"]
    if rule.what == _SEQUENCES:
        remedies.append(f"use {enough} of them")
        if rule.grid.y > 1 and "y" in rule.axes:
            remedies.append("set heads_over_y, or layout 'replicated'")
    elif rule.what in _SIZES and not pretrained:
        with suppress(ValueError):  # there may be no such model
            changed: dict[str, Any] = {rule.what: enough}
            replace(config, **changed)
            remedies.append(f"set it to {enough}")
    return ", or ".join(remedies)
