"""Values that ranks send each other as JSON, since reading JSON, unlike a pickle, runs no code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def of_first_rank(value: Any, group: ProcessGroup | None = None, *, rank: int = 0) -> Any:
    """Returns, on every rank, the value of the group's first rank, or of rank `rank`.

    value: JSON. group: default all ranks. Collectives: two broadcasts.
    """
    own = _text(value, group)
    size = torch.tensor([own.numel()], device=own.device)
    dist.broadcast(size, group=group, group_src=rank)
    if dist.get_rank(group) != rank:
        own = own.new_empty(int(size))
    dist.broadcast(own, group=group, group_src=rank)
    return _value(own)


def first_failure(error: str | None, group: ProcessGroup | None = None) -> tuple[int, str] | None:
    """Returns, on every rank, the first rank of the group with an error, and the error.

    None if no rank has one. Collectives: an all-reduce of a number; after an error, two broadcasts.
    """
    size = dist.get_world_size(group)
    first = torch.tensor(
        [size if error is None else dist.get_rank(group)],
        device=device_type(group or dist.group.WORLD),
    )
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    rank = int(first)
    return None if rank == size else (rank, str(of_first_rank(error, group, rank=rank)))


def of_all_ranks(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks of the group, by rank; default: all ranks.

    value: JSON; tuples come back as lists, and keys as strings. Each rank needs memory for one
        value per rank, all padded to the longest.
    Collectives: two all-gathers.
    """
    own = _text(value, group)
    size = torch.tensor([own.numel()], device=own.device)
    sizes = [int(each) for each in _all_gather(size, group)]
    padded = own.new_zeros(max(sizes))
    padded[: own.numel()] = own
    rows = _all_gather(padded, group)
    return [_value(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _text(value: Any, group: ProcessGroup | None) -> Tensor:
    """Returns the value as JSON, in bytes on the device whose tensors the group communicates."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return text.to(device_type(group or dist.group.WORLD))


def _value(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())


def _all_gather(own: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return found


def device_type(group: ProcessGroup | None) -> str:
    """Returns the type of device whose tensors a group communicates: "cuda" if it has NCCL."""
    return "cuda" if "cuda:nccl" in str(dist.get_backend_config(group)) else "cpu"


def dtype_named(text: str) -> torch.dtype:
    """Returns the dtype whose `str` this is. Raises ValueError if there is none."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a torch dtype, got {text!r}")
    return dtype
