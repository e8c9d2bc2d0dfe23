"""The state of a model and its optimizer, as blocks of named whole tensors.

    model.NAME              a parameter: its fp32 master where the optimizer has one
    buffer.NAME             a persistent buffer, equal on all ranks
    optimizer.NAME.KEY      a tensor that the optimizer keeps for a parameter
    rng.DEVICE              the states of all ranks' random number generators, one row each

So a checkpoint does not depend on the grid, the layout or the dtype of the job that wrote it. There
is one exception: a parameter of a module that `parallelize` has substituted for another may be
stored in a special order. Its NAME ends with that order, as in c_attn.weight@transposed,x=2. A
model whose parameter is in another order has another NAME, and `load` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.layout import Layout, grid_of
from axonn_ext.checkpoint.runs import Offsets, blocks_of_run
from axonn_ext.checkpoint.shards import Shard
from axonn_ext.nn.sharded import ShardedParameter, declaration_of, sharded_parameters
from axonn_ext.optim import AdamW
from axonn_ext.optim.pieces import MasterPiece

Optimizer = AdamW | torch.optim.Optimizer
T = TypeVar("T")
StoredAs = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a whole tensor
# Of our AdamW and Muon; torch's have more.
_OPTIONS = (
    {"lr", "betas", "eps", "weight_decay"},
    {"lr", "momentum", "nesterov", "adjust_lr", "weight_decay"},
)
_STEP = "step"  # a number; all other tensors of our optimizers are split like the parameter


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter, and the position of this rank's block in the whole one.

    layout: which blocks all ranks have
    """

    name: str
    parameter: nn.Parameter
    layout: Layout
    offsets: tuple[int, ...]

    def shard(self, tensor: Tensor) -> Shard:
        """Returns the shard of a tensor split like the parameter, without padding rows."""
        return self._clipped({self.offsets: tensor}, self.layout, tensor.dtype)

    def number(self, tensor: Tensor) -> Shard:
        """Returns the shard of a single number that every rank with part of the parameter has."""
        return Shard.whole(tensor, replace(self.layout, shape=(), dims=(), padding=0))

    def whole_block(self, shard: Shard) -> Tensor:
        """Returns the block of a `shard` result with its padding rows, filled with zeros."""
        if self.offsets[0] + len(self.parameter) <= self.layout.shape[0]:
            return shard.tensor
        block = torch.zeros_like(self.parameter, dtype=shard.dtype, requires_grad=False)
        for tensor in shard.blocks.values():
            block[: len(tensor)].copy_(tensor)
        return block

    def _clipped(
        self, blocks: Mapping[Offsets, Tensor], layout: Layout, dtype: torch.dtype
    ) -> Shard:
        """Returns the blocks without their padding, the rows beyond the whole tensor."""
        if layout.shape:
            rows = layout.shape[0]
            blocks = {
                offsets: tensor[: max(rows - offsets[0], 0)]
                for offsets, tensor in blocks.items()
                if offsets[0] < rows or not tensor.numel()
            }
        return Shard(layout, blocks, dtype)

    def shard_of_pieces(
        self, optimizer: AdamW, tensor_of: Callable[[MasterPiece], Tensor]
    ) -> Shard:
        """Returns this rank's shard of a tensor that is split like the parameter and its pieces."""
        blocks: dict[Offsets, Tensor] = {}
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        if not self.parameter.numel():  # no piece has a part of it
            return self.shard(self.parameter.detach().to(dtype))
        runs = optimizer.runs_of(self.parameter)
        for piece in optimizer.pieces_of(self.parameter) or ():
            tensor = tensor_of(piece).detach()
            if not runs:
                return self.shard(tensor)
            flat = tensor.reshape(-1)
            for inside, block in blocks_of_run(self.parameter.shape, piece.start, flat):
                blocks[tuple(map(sum, zip(self.offsets, inside, strict=True)))] = block
        return self._clipped(blocks, replace(self.layout, runs=runs), dtype)

    def step_of_pieces(self, optimizer: AdamW) -> Shard:
        """Returns the parameter's step count; the rank with its first element stores it."""
        pieces, runs = optimizer.pieces_of(self.parameter) or (), optimizer.runs_of(self.parameter)
        layout = replace(self.layout, shape=(), dims=(), padding=0)
        if runs and runs[0][-1]:
            *_, at, part = runs[0]
            layout = replace(layout, where={**layout.where, "data": (at // part,)})
        step = pieces[0].state[_STEP] if pieces else torch.zeros(())
        return Shard(layout, {(): step} if pieces else {}, step.dtype)


def placed_parameters(model: nn.Module) -> Iterator[PlacedParameter]:
    """Yields every parameter once.

    If no module declares how a grid splits it, every rank has each parameter in full. Raises
    ValueError if only some modules do, and CheckpointError for DTensors.
    """
    if any(declaration_of(module) is not None for module in model.modules()):
        for p in sharded_parameters(model):
            offsets, _ = p.grid.local_block(p.spec.full_sizes, p.spec.dims)
            name = f"{p.name}@{p.spec.stored_as}" if p.spec.stored_as else p.name
            yield PlacedParameter(name, p.parameter, _layout_of(p), tuple(offsets))
        return
    from torch.distributed.tensor import DTensor  # loads 600 modules

    _, size = place_in_world()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise CheckpointError(
                f"{name} is a DTensor: expected a model of axonn_ext, or one that each rank has "
                "in full; torch.distributed.checkpoint saves and loads models that FSDP2 has split"
            )
        layout = Layout.whole(size, parameter.shape)
        yield PlacedParameter(name, parameter, layout, (0,) * parameter.dim())


def _layout_of(p: ShardedParameter) -> Layout:
    pipe, stages = p.grid.shape.pipe, [p.grid.coords["pipe"]]
    if p.spec.on_ends:
        stages = [0, pipe - 1]
    dims = tuple(tuple(p.spec.dims.get(dim, ())) for dim in range(len(p.spec.full_sizes)))
    return Layout(
        grid_of(p.grid.shape), p.spec.state_sizes, dims, p.spec.padding,
        {"pipe": tuple(stages)} if pipe > 1 else {},
    )  # fmt: skip


def place_in_world() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks; (0, 1) without torch's groups."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def stage_of(model: nn.Module) -> Layout:
    """Returns the layout of a number that all ranks of this rank's pipeline stage have."""
    for module in model.modules():
        if (declared := declaration_of(module)) is not None:
            shape = declared.grid.shape
            stage = {"pipe": (declared.grid.coords["pipe"],)} if shape.pipe > 1 else {}
            return Layout(grid_of(shape), (), (), where=stage)
    return Layout.whole(place_in_world()[1], ())


def model_shards(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Shard]:
    """Returns the parameters or their masters, and the persistent buffers, without copying them."""
    shards = {}
    for p in placed_parameters(model):
        if isinstance(optimizer, AdamW) and optimizer.pieces_of(p.parameter) is not None:
            shards[f"model.{p.name}"] = p.shard_of_pieces(optimizer, lambda piece: piece.master)
        else:
            shards[f"model.{p.name}"] = p.shard(p.parameter.detach())
    persistent, stage = model.state_dict(keep_vars=True).keys(), stage_of(model)
    for name, buffer in model.named_buffers():
        if name in persistent:
            layout = replace(stage, shape=tuple(buffer.shape), dims=((),) * buffer.dim())
            shards[f"buffer.{name}"] = Shard.whole(buffer.detach(), layout)
    return shards


def optimizer_shards(model: nn.Module, optimizer: Optimizer) -> dict[str, Shard]:
    """Returns the optimizer's state; a torch optimizer has none before its first step.

    Raises CheckpointError for state whose split over ranks is unknown.
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
                shards[name] = p.number(value)
            else:
                raise CheckpointError(
                    f"{name} has shape {list(value.shape)}: expected that of the parameter, "
                    f"{list(p.parameter.shape)}, or a single number"
                )
    return shards


def _adamw_shards(model: nn.Module, optimizer: AdamW) -> dict[str, Shard]:
    """Returns the state of our AdamW or Muon, without copying it."""
    shards = {}
    for p in placed_parameters(model):
        if optimizer.pieces_of(p.parameter) is None or not p.parameter.numel():
            continue
        for key in optimizer.state_names(p.parameter):
            of_key = partial(_state_of, key)
            shards[f"optimizer.{p.name}.{key}"] = (
                p.step_of_pieces(optimizer)
                if key == _STEP
                else p.shard_of_pieces(optimizer, of_key)
            )
    return shards


def _state_of(key: str, piece: MasterPiece) -> Tensor:
    return piece.state[key]


def optimizer_targets(
    model: nn.Module,
    optimizer: Optimizer,
    stored: Mapping[str, StoredAs],
) -> dict[str, Shard]:
    """Returns memory for this optimizer's state in a checkpoint: our AdamW's own, new for torch's.

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
                shards[name] = p.number(torch.empty((), dtype=dtype))
    return shards


def misfits(
    model: nn.Module, optimizer: Optimizer, stored: Collection[str],
    saved: Sequence[Mapping[str, Any]],
) -> Iterator[str]:  # fmt: skip
    """Yields what this optimizer needs and a checkpoint lacks or has in another form.

    Our AdamW has all state of each parameter from the start. A torch optimizer has a parameter's
    state only from its first gradient on, and which parameters have had one is unknown; our AdamW
    then starts those with zeros.

    stored: names of tensors. saved: the saved options of each of the optimizer's groups.
    """
    for own, group in zip(optimizer_options(optimizer), saved, strict=True):
        for key in own.keys() & group.keys():
            if not _is_alike(own[key], group[key]):
                yield f"option {key} is {group[key]!r}, here {own[key]!r}"
    if isinstance(optimizer, AdamW):
        ours = all(set(group) in _OPTIONS for group in saved)
        begun = {name.rpartition(".")[0] for name in stored}
        for name in _adamw_shards(model, optimizer):
            if name.endswith(".ema"):
                continue  # an average may begin later
            if name not in stored and (ours or name.rpartition(".")[0] in begun):
                yield f"it does not have {name}"


def _is_alike(one: object, other: object) -> bool:
    """Whether an option with one value can also have the other."""
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
    """Replaces the optimizer's state.

    options: those of each parameter group, from `optimizer_options`; None: keep the current ones.
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
    """Zeroes state that was not loaded, and gives each piece its parameter's step.

    An average that was not loaded begins with the masters.
    """
    for name, shard in _adamw_shards(model, optimizer).items():
        for tensor in shard.blocks.values() if name not in loaded else ():
            tensor.zero_()
    for p in placed_parameters(model):
        pieces = optimizer.pieces_of(p.parameter) or ()
        for piece in pieces[1:]:
            piece.state[_STEP].copy_(pieces[0].state[_STEP])
        for piece in pieces if f"optimizer.{p.name}.ema" not in loaded else ():
            if "ema" in piece.state:
                piece.state["ema"].copy_(piece.master)


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
            group[key] = value


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
    """Returns the options of each parameter group, such as lr, including those schedules added."""
    if optimizer is None:
        return ()
    groups = optimizer.options if isinstance(optimizer, AdamW) else optimizer.param_groups
    names = ("params", "param_names")  # of this rank's parameters, and this grid's
    return tuple({k: value for k, value in group.items() if k not in names} for group in groups)


def random_shards() -> dict[str, Shard]:
    """Returns the states of this rank's random number generators: torch's for CPU and its GPU."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    rank, size = place_in_world()
    return {
        name: Shard(
            Layout((size, 1, 1, 1, 1), (size, len(state)), (("data",), ())),
            {(rank, 0): state[None]}, state.dtype,
        )
        for name, state in states.items()
    }  # fmt: skip


def set_random_state(shards: Mapping[str, Shard]) -> None:
    """Sets the generators to the states that `random_shards` returned."""
    if "rng.cpu" in shards:
        torch.set_rng_state(shards["rng.cpu"].tensor[0])
    if "rng.cuda" in shards:
        torch.cuda.set_rng_state(shards["rng.cuda"].tensor[0])
