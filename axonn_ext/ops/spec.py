"""OpSpec: what is known of an op of torch.ops.axonn without running it.

Nobody repeats the parameters of an op: a `Call` has them under the names in csrc/ops/schema.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from axonn_ext import _library  # noqa: F401  (registers the ops, whose schemas are read below)
from axonn_ext.ops.traffic import Collective, Group

# For `details` of ops that add over ranks.
SUMS = (
    "Sums over ranks accumulate in float32 (float64 for float64), those of NCCL in the tensors' "
    "dtype."
)
Results = Tensor | tuple[Tensor, ...] | None


class Call(SimpleNamespace):
    """The arguments of one call as attributes: call.a_shard, call.gather_dim, call.group_size."""

    @property
    def group(self) -> Group:
        """The group of an op that has one."""
        return Group(self.group_name, self.group_size, self.algorithm)

    @property
    def groups(self) -> list[Group]:
        """The groups of an op that has several, in the order of its arguments."""
        pairs = zip(self.group_names, self.group_sizes, strict=True)
        return [Group(name, size, self.algorithm) for name, size in pairs]


def _nothing(call: Call) -> Sequence[Collective]:
    return ()


@dataclass(frozen=True)
class OpSpec:
    """One op: how to compute what a call gives and sends, and what its users are told.

    name         in torch.ops.axonn
    results      the results of a call, left empty: their shapes, strides, dtypes and devices.
                 Values and sizes are taken as right: the kernels check them, once
    collectives  what a call issues, groups of one rank included, which issue nothing

    The rest is text, of which `documentation` is made:

    summary      a sentence that says what the op returns
    shapes       a line for each way to call it, with the shapes of one rank; W: ranks of its group
    details      whatever else a caller must know
    backward     how the gradients are computed
    traffic      what `collectives` computes, in words
    """

    name: str
    results: Callable[[Call], Results]
    summary: str
    shapes: str
    details: str = ""
    backward: str = ""
    collectives: Callable[[Call], Iterable[Collective]] = _nothing
    traffic: str = ""
    arguments: tuple[str, ...] = field(init=False)  # their names, by the op's schema

    def __post_init__(self) -> None:
        schema = getattr(torch.ops.axonn, self.name).default._schema
        object.__setattr__(self, "arguments", tuple(each.name for each in schema.arguments))

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call with these arguments, which torch has found to fit the schema."""
        return Call(**dict(zip(self.arguments, args, strict=False)), **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> Results:
        """The op for tensors that have no values, as torch.library.register_fake wants it."""
        return self.results(self.call(args, kwargs))

    @property
    def documentation(self) -> str:
        """The text for those who call the op, laid out like a docstring."""
        notes = [self.details] if self.details else []
        if self.backward:
            notes.append(f"Backward: {self.backward}.")
        if self.traffic:
            notes.append(f"Collectives: {self.traffic}.")
        paragraphs = [self.summary, indent(self.shapes, "    "), "\n".join(notes)]
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
