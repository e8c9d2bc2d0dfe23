"""Parameters that a grid splits: what each rank holds of them, and how they start.

A parameter's initial values depend on (seed, its full name, the element's index in the whole
tensor) alone, so they are bitwise the same on every grid and no rank ever holds more than its
block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)
from axonn_ext.grid import Dims, Grid


@dataclass(frozen=True)
class Init:
    """A distribution of initial values."""

    distribution: str  # "normal", "uniform" or "constant"
    a: float  # mean; low; the constant
    b: float = 0.0  # standard deviation; high

    @classmethod
    def normal(cls, std: float) -> Init:
        return cls("normal", 0.0, std)

    @classmethod
    def uniform(cls, bound: float) -> Init:
        return cls("uniform", -bound, bound)

    @classmethod
    def constant(cls, value: float) -> Init:
        return cls("constant", value)


@dataclass(frozen=True)
class ParameterSpec:
    """How the grid treats a parameter.

    dims         the axes that split each dim, as `Grid.shard` takes them
    summed_over  axes over which `sync_gradients` must still sum the gradient after backward: those
                 that split the rows it is computed from, less those that backward has summed over
    """

    full_sizes: tuple[int, ...]
    dims: Dims
    summed_over: tuple[str, ...]
    init: Init


class WeightSource(Protocol):
    """Gathers weights over z for modules, ahead of their use; see axonn_ext.overlap."""

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """The weight gathered over z, differentiable; its memory is there within `apply` only."""

    def apply(
        self, weight: Tensor, function: Callable[[Tensor], Tensor], *, saves_weight: bool = True
    ) -> Tensor:
        """function(weight), `weight` from `gather` being in memory meanwhile and, where the last
        node of function's graph saves it, in that node's backward, too."""


class ShardedModule(nn.Module):
    """A module whose own parameters are blocks of whole ones.

    weight_source: who gathers its weights over z; None: the module's own ops.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.weight_source: WeightSource | None = None
        self.specs: dict[str, ParameterSpec] = {}

    def add_parameter(
        self, name: str, spec: ParameterSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Registers this rank's block, uninitialised.

        Raises ValueError, naming module, parameter and numbers, where the grid does not divide it.
        """
        try:
            _, sizes = self.grid.local_block(spec.full_sizes, spec.dims)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}.{name}: {error}") from None
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(sizes, dtype=dtype, device=device)))


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a module tree, with its full name."""

    name: str
    parameter: nn.Parameter
    spec: ParameterSpec
    grid: Grid


def sharded_parameters(module: nn.Module) -> Iterator[ShardedParameter]:
    """Every parameter below `module`, once, tied ones under their first name.

    Raises ValueError for a parameter that is not one of axonn_ext.nn's modules: how its gradient
    is to be summed is not known.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full_name = f"{prefix}.{name}" if prefix else name
            if not isinstance(owner, ShardedModule):
                raise ValueError(
                    f"parameter {full_name} belongs to a {type(owner).__name__}, which does not "
                    "say how the grid splits it; use the modules of axonn_ext.nn"
                )
            yield ShardedParameter(full_name, parameter, owner.specs[name], owner.grid)


@torch.no_grad()
def initialize(module: nn.Module, *, seed: int, prefix: str = "") -> None:
    """Gives every parameter below `module` its initial values, the same on every grid.

    `prefix`: the name of `module` in the model, if it is part of one. No communication, and no
    memory beyond the parameters.
    """
    for p in sharded_parameters(module):
        init = p.spec.init
        if init.distribution == "constant":
            p.parameter.fill_(init.a)
            continue
        offsets, _ = p.grid.local_block(p.spec.full_sizes, p.spec.dims)
        name = f"{prefix}.{p.name}" if prefix else p.name
        torch.ops.axonn.fill_random_(
            p.parameter, p.spec.full_sizes, offsets, name, seed, init.distribution, init.a, init.b
        )


def rows_over(layout: str, axis: str) -> tuple[str, ...]:
    """The axes that split the rows of an activation: `axis` is one of them in `sharded` only."""
    return ("data", "z", axis) if layout == "sharded" else ("data", "z")


def own_rows(whole: Tensor, axis_rank: int, axis_size: int) -> Tensor:
    """This rank's block of rows of what it has whole."""
    rows = whole.shape[0] // axis_size
    return whole.narrow(0, axis_rank * rows, rows)
