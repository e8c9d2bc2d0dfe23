"""OpSpec describes an op of torch.ops.axonn: its results, its collectives, its documentation.

The parameters of an op are written down only once, in csrc/ops/schema.cpp: a `Call` has the
arguments under the names of that schema.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from axonn_ext.kernels import extension  # noqa: F401  (registers the ops, whose schemas are read below)
from axonn_ext.ops.traffic import Collective, Group

# Part of the documentation of ops that sum over ranks.
SUMS = (
    "Sums over ranks accumulate in float32 (float64 for float64), those of NCCL in the tensors' "
    "dtype."
)
Results = Tensor | tuple[Tensor, ...] | None


class Call(SimpleNamespace):
    """The arguments of a call as attributes: call.a_shard, call.gather_dim, call.group_size."""

    @property
    def group(self) -> Group:
        """The group, for an op that has one."""
        return Group(self.group_name, self.group_size, self.algorithm)

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order of the arguments, for an op that has several."""
        pairs = zip(self.group_names, self.group_sizes, strict=True)
        return [Group(name, size, self.algorithm) for name, size in pairs]


def _nothing(call: Call) -> Sequence[Collective]:
    return ()


@dataclass(frozen=True)
class OpSpec:
    """The description of one op.

    name           its name in torch.ops.axonn
    results        returns uninitialised tensors with the shapes, strides, dtypes and devices of the
                   results of a call. It assumes that the arguments are valid: only the kernels
                   check them
    documentation  what a caller must know, laid out like a docstring; for a function of
                   axonn_ext.ops, its docstring. Indented lines are ways to call the op, with the
                   shapes of one rank; "Backward: " says how the gradients are computed, and
                   "Collectives: " describes `collectives`, each up to a full stop at the end of a
                   line
    collectives    returns the collectives that a call issues. Those of groups of one rank are
                   included, although they send nothing
    """

    name: str
    results: Callable[[Call], Results]
    documentation: str | None  # None: Python removed docstrings (-OO)
    collectives: Callable[[Call], Iterable[Collective]] = _nothing
    arguments: tuple[str, ...] = field(init=False)  # the names of the arguments in the op's schema

    def __post_init__(self) -> None:
        schema = getattr(torch.ops.axonn, self.name).default._schema
        object.__setattr__(self, "arguments", tuple(each.name for each in schema.arguments))

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Returns a call with these arguments, which must fit the schema, as torch ensures."""
        return Call(**dict(zip(self.arguments, args, strict=False)), **kwargs)

    def fake(self, *args: Any, **kwargs: Any) -> Results:
        """Computes the op for tensors without values, as torch.library.register_fake needs it."""
        return self.results(self.call(args, kwargs))

    @property
    def shapes(self) -> list[str]:
        """The lines of the documentation that have shapes."""
        lines = inspect.cleandoc(self.documentation or "").splitlines()
        return [line.strip() for line in lines if line.startswith(" ")]

    @property
    def backward(self) -> str:
        """How the gradients are computed; "" if it is not described."""
        return self._told("Backward")

    @property
    def traffic(self) -> str:
        """A description of the result of `collectives`; "" for none."""
        return self._told("Collectives")

    def _told(self, what: str) -> str:
        pattern = re.compile(rf"^ *{what}: (.+?)\.$", re.MULTILINE | re.DOTALL)
        found = pattern.search(self.documentation or "")
        return " ".join(found[1].split()) if found else ""
