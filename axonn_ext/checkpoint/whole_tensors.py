"""Exports whole tensors from a sharded model and loads them into one, on any grid."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.optim.zero import all_shards
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.ranks.rank_values import dtype_named, of_all_ranks

State = dict[str, Tensor]


class NamedState:
    """A mixin for modules whose public state has other names, or another layout, than their own.

    Both methods take and return whole tensors, with names relative to the module.
    """

    def export_state(self, state: State) -> State:
        """Converts a state with this module's own names into the public one."""
        raise NotImplementedError

    def import_state(self, state: State) -> State:
        """Converts a state with public names into this module's own."""
        raise NotImplementedError


def full_state_dict(module: nn.Module) -> State:
    """Returns every whole parameter of the module, on every rank.

    For models of axonn_ext.models, names and layouts are those of Hugging Face: of GPT2LMHeadModel
    (Conv1D weights are [in, out]; c_attn holds all q, all k, all v), or of LlamaForCausalLM and the
    others (q, k, v, gate and up separate). Tied models list lm_head.weight in addition to the
    table. For other modules, they are those of `module.named_parameters()`.

    Collectives: all-gathers over the axes that split each parameter; with several pipeline stages,
    a broadcast of each over them.
    """
    return _export(module, lambda p: p.parameter.detach())


def full_gradients(module: nn.Module) -> State:
    """Returns every whole gradient with the names of `full_state_dict`.

    Call it after `sync_gradients`. Parameters without a gradient are left out. Collectives: as in
    `full_state_dict`, and all-gathers over data of the gradients that ZeRO shards.
    """
    parts = [shards.whole() for shards in all_shards(sharded_parameters(module))]
    sums = dict(ChainMap(*parts))
    return _export(module, lambda p: sums.get(id(p.parameter), p.parameter.grad))


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies this rank's block of each whole tensor into the module: reverses `full_state_dict`.

    Raises ValueError, and changes nothing, if tensors are missing, unexpected or of another shape,
    or if tensors of tied weights differ. The message names them. Collectives: none on one pipeline
    stage; on several, an all-gather of their names.
    """
    parameters = {p.name: p for p in sharded_parameters(module)}
    whole = {
        name: torch.empty(p.spec.state_sizes, dtype=p.parameter.dtype, device="meta")
        for name, p in parameters.items()
    }
    public = _convert(module, whole, exporting=True)
    state = _with_tied(dict(state), public)
    stages = _stages_of(module)
    known = public.keys() if stages is None else names_of_stages(stages, public)
    missing, unexpected = sorted(public.keys() - state), sorted(state.keys() - known)
    if missing or unexpected:
        raise ValueError(
            f"load_full_state_dict: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}"
        )
    for name, expected in public.items():
        if state[name].shape != expected.shape:
            raise ValueError(
                f"load_full_state_dict: {name} must have shape {list(expected.shape)}, "
                f"got {list(state[name].shape)}"
            )
    local = _convert(module, state, exporting=False)
    for name, p in parameters.items():
        p.parameter.copy_(p.block(local[name]))


def _with_tied(state: State, public: Mapping[str, Tensor]) -> State:
    """Adds the missing names of tied tensors; files often have only one of them."""
    for name, tensor in public.items():
        twins = [other for other, t in public.items() if t is tensor and other in state]
        if name not in state and twins:
            state[name] = state[twins[0]]
    return state


def _export(module: nn.Module, tensor_of: Callable[[ShardedParameter], Tensor | None]) -> State:
    state = {}
    for p in sharded_parameters(module):
        local = tensor_of(p)
        if local is not None:
            state[p.name] = p.whole(local).clone()
    return _of_all_stages(module, _convert(module, state, exporting=True))


def _stages_of(module: nn.Module) -> AxisGroup | None:
    """Returns the pipeline whose stages hold the parameters; None if there is only one stage."""
    first = next(iter(sharded_parameters(module)), None)
    stages = None if first is None else first.grid.axis("pipe")
    return stages if stages is not None and stages.size > 1 else None


def names_of_stages(stages: AxisGroup, names: Iterable[str]) -> set[str]:
    """Returns the names that some stage has. Collectives: with several stages, an all-gather."""
    own = set(names)
    return own if stages.size == 1 else own.union(*of_all_ranks([*own], stages.process_group))


def _of_all_stages(module: nn.Module, own: State) -> State:
    """Returns the tensors of all stages, each from the first stage that has it."""
    stages = _stages_of(module)
    if stages is None:
        return own
    described = {
        name: (list(t.shape), str(t.dtype), next(n for n, other in own.items() if other is t))
        for name, t in own.items()
    }
    found = of_all_ranks(described, stages.process_group)
    device = next(module.parameters()).device
    state: State = {}
    for stage, described in enumerate(found):
        for name, (shape, dtype, same_as) in described.items():
            if name in state:
                continue
            if same_as != name:  # a tied tensor, under its second name
                state[name] = state[same_as]
                continue
            mine = stage == stages.rank
            tensor = (
                own[name].contiguous()
                if mine
                else torch.empty(shape, dtype=dtype_named(dtype), device=device)
            )
            dist.broadcast(tensor, group=stages.process_group, group_src=stage)
            state[name] = tensor
    return state


def _convert(module: nn.Module, state: State, *, exporting: bool) -> State:
    """Applies every `NamedState` of `module` and its submodules to the names within it."""
    for prefix, owner in module.named_modules():
        if isinstance(owner, NamedState):
            start = f"{prefix}." if prefix else ""
            own = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
            rest = {k: v for k, v in state.items() if not k.startswith(start)}
            converted = owner.export_state(own) if exporting else owner.import_state(own)
            state = rest | {start + name: tensor for name, tensor in converted.items()}
    return state
