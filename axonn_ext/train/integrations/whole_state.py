"""Makes torch's `state_dict` and `load_state_dict` return and take whole tensors.

This uses torch's own hooks, so a framework saves the same files as in a plain script, and they can
be loaded on any grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.nn.sharded import ShardedParameter, declaration_of

Owners = Mapping[int, ShardedParameter]  # by the id of a parameter


def make_model_whole(model: nn.Module) -> None:
    """Adds hooks to every module that a grid splits.

    `state_dict` then gathers, so all ranks must call it; with keep_vars=True it returns this rank's
    parameters themselves. `load_state_dict` takes whole tensors and issues no collectives.
    """
    for module in model.modules():
        if declaration_of(module) is not None:
            module.register_state_dict_post_hook(_gather_parameters)
            module.register_load_state_dict_pre_hook(_shard_parameters)


def make_optimizer_whole(optimizer: torch.optim.Optimizer, owners: Callable[[], Owners]) -> None:
    """Does the same for an optimizer's state. owners: returns the parameters on a grid."""

    def gather(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return _convert(optimizer, state, owners(), _whole)

    def shard(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return _convert(optimizer, state, owners(), _block)

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(shard)


def _gather_parameters(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    declared = declaration_of(module)
    assert declared is not None
    for name, spec in declared.specs.items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = spec.without_padding(declared.grid.unshard(value, spec.dims))


def _shard_parameters(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    declared = declaration_of(module)
    assert declared is not None
    for name, spec in declared.specs.items():
        value = state.get(prefix + name)
        if value is None:
            continue
        if tuple(value.shape) != spec.state_sizes:
            errors.append(
                f"{prefix + name} must have the whole shape {list(spec.state_sizes)}, got "
                f"{list(value.shape)}"
            )
        else:
            state[prefix + name] = declared.grid.shard(spec.with_padding(value), spec.dims)


def _convert(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    owners: Owners,
    convert: Callable[[Tensor, ShardedParameter, str], Tensor],
) -> dict[str, Any]:
    """Returns the optimizer's state with the tensors of each parameter converted."""
    numbered = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
    values = dict(state["state"])
    for number in sorted(values.keys() & numbered.keys()):  # the same order on every rank
        p = owners.get(id(numbered[number]))
        if p is not None:
            values[number] = {
                key: convert(value, p, key) if isinstance(value, Tensor) and value.dim() else value
                for key, value in values[number].items()
            }
    return {**state, "state": values}


def _whole(value: Tensor, p: ShardedParameter, key: str) -> Tensor:
    _check(value, p, key, [tuple(p.parameter.shape)])
    return p.whole(value)


def _block(value: Tensor, p: ShardedParameter, key: str) -> Tensor:
    # axonn_ext.checkpoint loads blocks.
    _check(value, p, key, [p.spec.state_sizes, tuple(p.parameter.shape)])
    return p.block(value) if value.shape == p.spec.state_sizes else value


def _check(value: Tensor, p: ShardedParameter, key: str, shapes: list[tuple[int, ...]]) -> None:
    if tuple(value.shape) not in shapes:
        raise ValueError(
            f"the optimizer's {key} of {p.name} must have the shape of the parameter, "
            f"{list(shapes[0])}, got {list(value.shape)}"
        )
