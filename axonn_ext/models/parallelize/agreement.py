"""Checks that ranks have equal calls, modules and values, also in a split model's first call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from axonn_ext.models.parallelize.results import shown, tensors_of
from axonn_ext.models.parallelize.same import text_of
from axonn_ext.ranks import meeting
from axonn_ext.ranks.grid import Grid

Named = Sequence[tuple[str, nn.Parameter]]


def agree_on_parameters(parameters: Named, *, what: str) -> None:
    """Raises RuntimeError, on every rank, unless all ranks have equal parameters, by name.

    what: the caller, for messages. Values of tensors on the meta device are not compared.

    Raises ValueError for a parameter of a lazy module, which has no shape yet.
    """
    try:
        with agreement(what=what) as facts:
            facts |= {name: text_of(what, name, parameter) for name, parameter in parameters}
    except meeting.RanksDiffer as error:
        raise RuntimeError(
            f"{error}\nevery rank must make the same model: call torch.manual_seed with the same "
            "number on every rank before"
        ) from None


class SameInputs:
    """A forward pre-hook of a model that raises RuntimeError if ranks of x and y pass other rows.

    It compares dense tensor arguments in the first call, and in the first with or without gradients
    if that is a later one: bits, or shape and dtype for what needs a gradient, which other modules
    may have computed in another order. It then copies them to the host. It ignores meta and fake
    tensors, and calls that torch.compile traces or a CUDA graph captures. Collectives: none;
    digests go through the c10d store.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._checked: set[bool] = set()

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() in self._checked:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        tensors = _arguments(module, args, kwargs)
        if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors.values()):
            return
        self._checked.add(torch.is_grad_enabled())
        grid = self.grid
        first, count = grid.rank - grid.part(("y", "x")), grid.num_parts(("y", "x"))
        try:
            with agreement(what="parallelize", ranks=range(first, first + count)) as facts:
                for name, tensor in tensors.items():
                    kept = tensor.to("meta") if tensor.requires_grad else tensor
                    facts[f"the argument {name}"] = text_of("parallelize", name, kept)
        except meeting.RanksDiffer as error:
            raise RuntimeError(f"{error}\n{self._advice()}") from None
        except meeting.RanksMissing as error:
            raise RuntimeError(
                f"{error}\nall ranks of x and y must call the model, also to evaluate it"
            ) from None

    def _advice(self) -> str:
        axes = " and ".join(f"{a}={self.grid.size(a)}" for a in "xy" if self.grid.size(a) > 1)
        groups = ("data", "z")
        part, parts = self.grid.part(groups), self.grid.num_parts(groups)
        own = f"part {part + 1} of {parts} of the batch" if parts > 1 else "the whole batch"
        return (
            f"give all ranks of x and y ({axes}) the same rows, unlike with "
            f"DistributedDataParallel: rank {self.grid.rank} takes {own}, "
            'grid.shard(batch, {0: ("data", "z")})'
        )


def _arguments(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, Tensor]:
    """Returns the dense tensors among forward's arguments, and directly in one, by name.

    Tensors further inside may be keys and values of an earlier call, which are split by heads.
    """
    names = [*inspect.signature(module.forward).parameters][: len(args)]
    names += [str(i) for i in range(len(names), len(args))]
    found = tensors_of(dict(zip(names, args, strict=True)) | kwargs)
    return {shown(key): t for key, t in found.items() if len(key) <= 2 and _is_dense(t)}


def _is_dense(tensor: Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_nested
    return plain and not isinstance(tensor, DTensor)


@contextmanager
def agreement(*, what: str, ranks: Sequence[int] | None = None) -> Iterator[dict[str, str]]:
    """Yields a dict; raises RuntimeError at the end of the block unless it is equal on all ranks.

    The block adds the values that must be equal. If it raises on one rank, all others raise, too.
    ranks: the calling ranks, default all. Collectives: none; a digest is exchanged through the c10d
    store.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception:
        report_failure(what=what, ranks=ranks)
        raise
    meeting.same_in_world(facts, what=what, ranks=ranks)


def report_failure(*, what: str, ranks: Sequence[int] | None = None) -> None:
    """Makes the other ranks raise, which wait in this caller's comparison."""
    with suppress(Exception):  # this rank's own error matters more
        meeting.same_in_world(None, what=what, ranks=ranks)
