"""Turns a module into one of another class, in place."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from axonn_ext.nn.sharded import ShardedModule


def become(module: nn.Module, other: ShardedModule, *, done: Collection[int] = ()) -> None:
    """Turns `module` into `other` in place, with its own values, parameters, hooks and mode.

    `other` has uninitialised blocks of the whole parameters of `module`. The module object and its
    Parameter objects stay the same, so that all references to them stay valid; other attributes
    that were set on them stay, too. done: ids of parameters that are already blocks, since they are
    shared with another module.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in parameters.items():
        if id(parameter) not in done:
            set_values(parameter, other.grid.shard(parameter.detach(), other.specs[name].dims))
    usual = nn.Module().__dict__
    fresh = {key: value for key, value in other.__dict__.items() if key not in usual}
    module.__class__ = type(other)
    module.__dict__.update(fresh)
    for name, absent in other._parameters.items():  # a norm without a bias has one that is None
        if absent is None:
            module._parameters.setdefault(name, None)


@torch.no_grad()
def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Sets the parameter to values of any shape; drops its gradient."""
    parameter.data = values
    parameter.grad = None
