"""The collectives that torch's own ops issue, both torch.distributed's (c10d) and functional."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.ops.traffic import Collective

# Op -> (kind of collective, name of the argument with the tensors that a rank passes in). For
# gather and scatter, the argument with one rank's part.
_OPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "c10d::allgather_": ("all_gather", "input_tensors"),
        "c10d::_allgather_base_": ("all_gather", "input_tensor"),
        "c10d::allgather_coalesced_": ("all_gather", "input_list"),
        "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
        "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
        "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
        "c10d::allreduce_": ("all_reduce", "tensors"),
        "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
        "c10d::alltoall_": ("all_to_all", "input_tensors"),
        "c10d::alltoall_base_": ("all_to_all", "input"),
        "c10d::broadcast_": ("broadcast", "tensors"),
        "c10d::reduce_": ("reduce", "tensors"),
        "c10d::gather_": ("gather", "input_tensors"),
        "c10d::scatter_": ("scatter", "output_tensors"),
        "c10d::send": ("send", "tensors"),
        "c10d::recv_": ("recv", "tensors"),
        "c10d::recv_any_source_": ("recv", "tensors"),
        "c10d::barrier": ("barrier", "tensor"),
        "c10d::monitored_barrier_": ("barrier", "tensor"),
        "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
        "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input"),
        "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
        "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
        "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
        "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
        "_c10d_functional::all_reduce": ("all_reduce", "input"),
        "_c10d_functional::all_reduce_": ("all_reduce", "input"),
        "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
        "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
        "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
        "_c10d_functional::broadcast": ("broadcast", "input"),
        "_c10d_functional::broadcast_": ("broadcast", "input"),
        "_c10d_functional::isend": ("send", "tensor"),
        "_c10d_functional::irecv": ("recv", "tensor"),
        "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
    }
)
_GROUP_ARGUMENTS = ("group_name", "group_names", "process_group")
NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor", "symm_mem"})


def takes_group(op: torch._ops.OpOverload) -> bool:
    """Whether the op has a process group among its arguments, as every collective does."""
    return any(argument.name in _GROUP_ARGUMENTS for argument in op._schema.arguments)


def collectives_of(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Collective]:
    """Yields the collectives that a call of a torch collective issues: one per dtype.

    Raises NotImplementedError for an unknown op.
    """
    name = op._schema.name
    names = (argument.name for argument in op._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if name not in _OPS:
        raise NotImplementedError(
            f"trace_communication: cannot tell what {name} sends; leave it out of the trace"
        )
    kind, passed_in = _OPS[name]
    group = _process_group(arguments.get("process_group", arguments.get("group_name")))
    tensors = list(_flatten(arguments[passed_in]))
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        num_elements = sum(t.numel() for t in tensors if t.dtype == dtype)
        yield Collective(kind, group.group_name, group.size(), num_elements, dtype)


def _process_group(group: Any) -> ProcessGroup:
    if isinstance(group, str):
        resolve = torch.distributed.distributed_c10d._resolve_process_group
        return resolve(group)  # type: ignore[arg-type]
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


def _flatten(tensors: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tensor, of a list or of a list of lists."""
    if isinstance(tensors, Tensor):
        yield tensors
        return
    for part in tensors:
        yield from _flatten(part)
