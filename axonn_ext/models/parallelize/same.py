"""Compares models, or any values, that must be equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from axonn_ext.nn.sharded import declaration_of
from axonn_ext.ranks import meeting

_NAME = "check_same_on_all_ranks"
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


def check_same_on_all_ranks(
    model_or_values: nn.Module | Mapping[str, object], *, ranks: Sequence[int] | None = None
) -> None:
    """Raises an error, on every rank, unless all ranks pass equal models or values.

        check_same_on_all_ranks(model)                        # before parallelize, or DDP
        check_same_on_all_ranks({"lr": lr, "seed": seed})
        check_same_on_all_ranks(optimizer.state_dict())

    For a model, parameters and buffers are compared: names, shapes, dtypes, whether they are
    trained, and a digest of their bits, on any device. It must not be on a grid yet, since ranks
    then hold different blocks. Values may be tensors, numbers, strings and None, also in mappings
    and sequences.

    All ranks must call it, in the same order; ranks: the calling ranks, default all. It does
    nothing without torch.distributed or with a single process.

    Collectives: none. A digest is exchanged through the c10d store, the values only if they differ.

    Raises:
        RuntimeError: names the values, of at most 8 parameters or keys, and the ranks that have
            them; or the ranks that do not arrive within AXONN_TIMEOUT_SECONDS; or those on which
            this function raised one of the following errors.
        ValueError: the model is on a grid, or has parameters without a shape yet or a DTensor.
        TypeError: a value has another type.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    if (dist.get_world_size() if ranks is None else len(ranks)) == 1:
        return
    try:
        said = dict(_said(model_or_values))
    except Exception:
        with suppress(Exception):  # the error above matters more
            meeting.same_in_world(None, what=_NAME, ranks=ranks)
        raise
    meeting.same_in_world(said, what=_NAME, ranks=ranks)


def _said(value: object) -> Iterator[tuple[str, str]]:
    if not isinstance(value, nn.Module):
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{_NAME}: model_or_values must be a Module or a mapping, got "
                f"{type(value).__name__}"
            )
        yield from _leaves("", value)
        return
    for name, module in value.named_modules():
        if declaration_of(module) is not None:
            raise ValueError(
                f"{_NAME}: {name or 'the model'} is on a grid, where ranks hold different blocks; "
                "call it before parallelize"
            )
    for name, parameter in value.named_parameters():
        trained = "" if parameter.requires_grad else "frozen "
        yield name, f"{trained}{text_of(_NAME, name, parameter)}"
    for name, buffer in value.named_buffers():
        yield name, text_of(_NAME, name, buffer)


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of a value and of its elements."""
    if isinstance(value, Tensor):
        yield name, text_of(_NAME, name, value)
    elif isinstance(value, Mapping):
        yield f"the keys of {name or 'the values'}", str([*value])
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        yield f"the length of {name}", str(len(value))
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}.{index}", inner)
    elif isinstance(value, _LEAVES):
        yield name, repr(value)
    else:
        raise TypeError(
            f"{_NAME}: {name} must be a tensor, a number, a string, bytes, a dtype or None, got "
            f"{type(value).__name__}"
        )


def text_of(what: str, name: str, tensor: Tensor) -> str:
    """Returns dtype, shape and a digest of a tensor (no digest on the meta device).

    what, name: the caller and the tensor, for messages. Raises ValueError for a parameter of a lazy
    module, and for a DTensor.
    """
    if is_lazy(tensor):
        raise ValueError(
            f"{what}: {name} has no shape yet; run the model once before, or use a module that is "
            "not lazy"
        )
    if isinstance(tensor, DTensor):
        raise ValueError(f"{what}: {name} is a DTensor, a part on each rank")
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.is_meta:
        return kind
    bits = (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    )
    return f"{kind} {hashlib.sha256(bits.numpy().data).hexdigest()[:12]}"
