"""What a model and its optimizer have to keep, as blocks of whole tensors with names.

    model.NAME              a parameter: its fp32 master where the optimizer has one
    buffer.NAME             a persistent buffer, equal on all ranks
    optimizer.NAME.KEY      a tensor that the optimizer keeps for a parameter
    rng.DEVICE.RANK         the state of a rank's random numbers

So a checkpoint knows nothing of the grid, the layout or the dtype of the job that wrote it. There
is one exception: a parameter of a module that `parallelize` has put in the place of another may be
in an order of its own, which its NAME ends with, as in c_attn.weight@transposed,x=2. A model whose
parameter is in another order has another NAME, and `load` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.shards import Offsets, Shard, blocks_of_run
from axonn_ext.nn.sharded import declaration_of, sharded_parameters
from axonn_ext.optim import AdamW, Piece

Optimizer = AdamW | torch.optim.Optimizer
T = TypeVar("T")
StoredAs = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a whole tensor
_OPTIONS = {"lr", "betas", "eps", "weight_decay"}  # of our AdamW; torch's have more


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter, and the place of this rank's block in the whole one."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def shard(self, tensor: Tensor) -> Shard:
        """Returns a tensor that is split as the parameter is, without the rows that are padding."""
        return self._clipped({self.offsets: tensor}, tensor.dtype)

    def whole_block(self, shard: Shard) -> Tensor:
        """Returns what `shard` returned with padding, which is zero."""
        if self.offsets[0] + len(self.parameter) <= self.shape[0]:
            return shard.tensor
        block = torch.zeros_like(self.parameter, dtype=shard.dtype, requires_grad=False)
        for tensor in shard.blocks.values():
            block[: len(tensor)].copy_(tensor)
        return block

    def _clipped(self, blocks: Mapping[Offsets, Tensor], dtype: torch.dtype) -> Shard:
        """Returns the blocks without rows beyond the whole tensor, which are padding."""
        if not self.shape:
            return Shard(self.shape, blocks, dtype)
        rows = self.shape[0]
        kept = {
            offsets: tensor[: max(rows - offsets[0], 0)]
            for offsets, tensor in blocks.items()
            if offsets[0] < rows or not tensor.numel()
        }
        return Shard(self.shape, kept, dtype)

    def shard_of_pieces(
        self, pieces: Sequence[Piece], tensor_of: Callable[[Piece], Tensor]
    ) -> Shard:
        """Returns what this rank has of a tensor that is split as the parameter and the pieces."""
        blocks: dict[Offsets, Tensor] = {}
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        if not self.parameter.numel():  # no piece has a part of it
            return self.shard(self.parameter.detach().to(dtype))
        for piece in pieces:
            tensor = tensor_of(piece).detach()
            if tensor.shape == self.parameter.shape:
                return self.shard(tensor)
            for inside, block in blocks_of_run(self.parameter.shape, piece.start, tensor):
                blocks[tuple(map(sum, zip(self.offsets, inside, strict=True)))] = block
        return self._clipped(blocks, dtype)


def placed_parameters(model: nn.Module) -> Iterator[PlacedParameter]:
    """Yields every parameter once.

    A model in which no module says how a grid splits it has each parameter whole on every rank.
    Raises ValueError for a model in which only some modules do, CheckpointError for DTensors.
    """
    if any(declaration_of(module) is not None for module in model.modules()):
        for p in sharded_parameters(model):
            offsets, _ = p.grid.local_block(p.spec.full_sizes, p.spec.dims)
            name = f"{p.name}@{p.spec.stored_as}" if p.spec.stored_as else p.name
            yield PlacedParameter(name, p.parameter, p.spec.state_sizes, tuple(offsets))
        return
    from torch.distributed.tensor import DTensor  # loads 600 modules

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise CheckpointError(
                f"{name} is a DTensor: expected a model of axonn_ext, or one that each rank has "
                "whole; torch.distributed.checkpoint saves and loads what FSDP2 has split"
            )
        yield PlacedParameter(name, parameter, tuple(parameter.shape), (0,) * parameter.dim())


def model_shards(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Shard]:
    """Returns the parameters, or their masters, and the persistent buffers, which share memory."""
    shards = {}
    for p in placed_parameters(model):
        pieces = optimizer.pieces_of(p.parameter) if isinstance(optimizer, AdamW) else None
        if pieces is None:
            shards[f"model.{p.name}"] = p.shard(p.parameter.detach())
        else:
            shards[f"model.{p.name}"] = p.shard_of_pieces(pieces, lambda piece: piece.master)
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            shards[f"buffer.{name}"] = Shard.whole(buffer.detach())
    return shards


def optimizer_shards(model: nn.Module, optimizer: Optimizer) -> dict[str, Shard]:
    """Returns what the optimizer keeps; one of torch keeps nothing before its first step.

    Raises CheckpointError for state of which it is not known how it is split.
    """
    if isinstance(optimizer, AdamW):
        return _adamw_shards(model, optimizer)
    shards = {}
    for p in placed_parameters(model):
        for key, value in optimizer.state.get(p.parameter, {}).items():
            if value is None:
                continue
            name = f"optimizer.{p.name}.{key}"
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{name} is a {type(value).__name__}: expected a tensor")
            if value.shape == p.parameter.shape:
                shards[name] = p.shard(value)
            elif value.dim() == 0:
                shards[name] = Shard.whole(value)
            else:
                raise CheckpointError(
                    f"{name} has shape {list(value.shape)}: expected that of the parameter, "
                    f"{list(p.parameter.shape)}, or a single number"
                )
    return shards


def _adamw_shards(model: nn.Module, optimizer: AdamW) -> dict[str, Shard]:
    """Returns the state of our AdamW, which shares memory with it."""
    shards = {}
    for p in placed_parameters(model):
        pieces = optimizer.pieces_of(p.parameter)
        if pieces:
            name = f"optimizer.{p.name}"
            shards[f"{name}.step"] = Shard.whole(pieces[0].step)
            shards[f"{name}.exp_avg"] = p.shard_of_pieces(pieces, lambda piece: piece.exp_avg)
            shards[f"{name}.exp_avg_sq"] = p.shard_of_pieces(pieces, lambda piece: piece.exp_avg_sq)
    return shards


def optimizer_targets(
    model: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, StoredAs],
) -> dict[str, Shard]:
    """Returns memory for what a checkpoint has of this optimizer: that of ours, new for torch's.

    stored: shape and dtype of each of the checkpoint's tensors.
    """
    if isinstance(optimizer, AdamW):
        own = _adamw_shards(model, optimizer)
        return {name: shard for name, shard in own.items() if name in stored}
    shards = {}
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    keys = _by_parameter(stored)
    for p in placed_parameters(model):
        if id(p.parameter) not in params:
            continue
        for key, (shape, dtype) in keys.get(p.name, {}).items():
            name = f"optimizer.{p.name}.{key}"
            if shape:
                shards[name] = p.shard(
                    torch.empty_like(p.parameter, dtype=dtype, requires_grad=False)
                )
            else:
                shards[name] = Shard.whole(torch.empty((), dtype=dtype))
    return shards


def misfits(
    model: nn.Module, optimizer: Optimizer, stored: Collection[str],
    saved: Sequence[Mapping[str, Any]],
) -> Iterator[str]:  # fmt: skip
    """Yields what a checkpoint lacks of this optimizer, or has otherwise.

    Ours keeps all tensors of each parameter from its beginning on. One of torch keeps those of a
    parameter from the first gradient on, and it is not known which; ours begins with zeros there.

    stored: names of tensors. saved: the options of as many groups as the optimizer has.
    """
    for own, group in zip(optimizer_options(optimizer), saved, strict=True):
        for key in own.keys() & group.keys():
            if not _is_alike(own[key], group[key]):
                yield f"option {key} is {group[key]!r}, here {own[key]!r}"
    if isinstance(optimizer, AdamW):
        ours = all(set(group) == _OPTIONS for group in saved)
        begun = {name.rpartition(".")[0] for name in stored}
        for name in _adamw_shards(model, optimizer):
            if name not in stored and (ours or name.rpartition(".")[0] in begun):
                yield f"it does not have {name}"


def _is_alike(one: object, other: object) -> bool:
    """Whether an option that has one value can have the other one."""
    if isinstance(one, int | float | Tensor):
        return isinstance(other, int | float | Tensor)
    if isinstance(one, tuple):
        return isinstance(other, list | tuple) and len(one) == len(other)
    return True


def set_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    shards: Mapping[str, Shard],
    options: tuple[Mapping[str, Any], ...] | None,
) -> None:
    """Gives the optimizer this state in place of its own.

    options: of each group of parameters, as `optimizer_options` returned them; None: they stay.
    """
    if isinstance(optimizer, AdamW):
        _complete(model, optimizer, shards)
        _set_options(optimizer.options, options, known_only=True)
        return
    state = optimizer.state_dict()
    numbers = {
        id(parameter): number
        for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    state["state"] = {}
    values = _by_parameter(shards)
    for p in placed_parameters(model):
        number = numbers.get(id(p.parameter))
        if number is not None and p.name in values:
            state["state"][number] = {
                key: p.whole_block(s) if s.shape else s.tensor for key, s in values[p.name].items()
            }
    _set_options(state["param_groups"], options)
    optimizer.load_state_dict(state)


@torch.no_grad()
def _complete(model: nn.Module, optimizer: AdamW, loaded: Mapping[str, Shard]) -> None:
    """Clears what was not loaded, and gives each piece its parameter's step."""
    for name, shard in _adamw_shards(model, optimizer).items():
        for tensor in shard.blocks.values() if name not in loaded else ():
            tensor.zero_()
    for p in placed_parameters(model):
        pieces = optimizer.pieces_of(p.parameter) or ()
        for piece in pieces[1:]:
            piece.step.copy_(pieces[0].step)


def _set_options(
    groups: Sequence[dict[str, Any]], options: tuple[Mapping[str, Any], ...] | None, *,
    known_only: bool = False,
) -> None:  # fmt: skip
    for group, saved in zip(groups, options or (), strict=options is not None):
        for key, value in saved.items():
            if known_only and key not in group:  # of another optimizer
                continue
            now = group.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                value = value.to(now.device)
            # Checkpoints of format 1 have lists for tuples, such as betas.
            group[key] = tuple(value) if isinstance(now, tuple) else value


def _by_parameter(named: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Returns the values of optimizer.NAME.KEY as NAME -> KEY -> value."""
    found: dict[str, dict[str, T]] = {}
    for name, value in named.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            owner, _, key = rest.rpartition(".")
            found.setdefault(owner, {})[key] = value
    return found


def optimizer_options(optimizer: Optimizer | None) -> tuple[Mapping[str, Any], ...]:
    """Returns the options of each group of parameters, such as lr, with what schedules added."""
    if optimizer is None:
        return ()
    groups = optimizer.options if isinstance(optimizer, AdamW) else optimizer.param_groups
    names = ("params", "param_names")  # of this rank's parameters, and this grid's
    return tuple({k: value for k, value in group.items() if k not in names} for group in groups)


def random_shards(rank: int) -> dict[str, Shard]:
    """Returns the state of this rank's random numbers: of torch on the CPU and on its GPU."""
    shards = {f"rng.cpu.{rank}": Shard.whole(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        shards[f"rng.cuda.{rank}"] = Shard.whole(torch.cuda.get_rng_state())
    return shards


def set_random_state(shards: Mapping[str, Shard]) -> None:
    """Sets what `random_shards` returned."""
    for name, shard in shards.items():
        if name.startswith("rng.cpu."):
            torch.set_rng_state(shard.tensor)
        elif name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(shard.tensor)
