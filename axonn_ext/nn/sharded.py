"""Parameters that a grid splits: each rank's block, and the initial values.

The initial value of an element depends only on the seed, the full name of the parameter and the
index of the element in the whole tensor. So it is bitwise the same on every grid, and no rank ever
holds more than its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)
from axonn_ext.ranks.grid import Dims, Grid
from axonn_ext.spec.grid import SUM_ORDER

_DECLARATION = "_axonn_declaration"  # the module attribute that `declare` sets


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

    dims         the axes that split each dim, as in `Grid.shard`
    summed_over  the axes over which `sync_gradients` must sum the gradient after backward: the axes
                 that split the rows from which it is computed, except those over which backward
                 already sums it
    init         the distribution of the initial values; None: they come from elsewhere, and
                 `initialize` refuses the parameter
    on_ends      the first and the last stage of a pipeline both hold the parameter, each with a
                 part of its gradient: `sync_gradients` adds the two
    padding      number of zero rows at the end of the whole tensor, so that the grid divides it; no
                 state has them
    stored_as    how the whole tensor differs from the one of that name elsewhere, such as
                 "transposed"; a part of its name in checkpoints. Must not contain "."
    """

    full_sizes: tuple[int, ...]
    dims: Dims
    summed_over: tuple[str, ...]
    init: Init | None
    stored_as: str = ""
    on_ends: bool = False
    padding: int = 0

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The sizes of the whole tensor in states, without padding."""
        return (self.full_sizes[0] - self.padding, *self.full_sizes[1:])

    def without_padding(self, whole: Tensor) -> Tensor:
        """Returns a whole tensor without padding, as in states."""
        return whole.narrow(0, 0, whole.shape[0] - self.padding) if self.padding else whole

    def with_padding(self, whole: Tensor) -> Tensor:
        """Returns a whole tensor with padding, as the grid splits it, given a state's tensor."""
        if not self.padding:
            return whole
        return torch.cat([whole, whole.new_zeros(self.padding, *whole.shape[1:])])


class WeightSource(Protocol):
    """Gathers weights over z for modules, ahead of their use; see axonn_ext.overlap."""

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """Returns the weight gathered over z; the result is differentiable.

        Its memory holds the values only during `apply`.
        """

    def apply(
        self,
        weights: Sequence[Tensor],
        function: Callable[..., Tensor],
        *,
        saves_weights: bool = True,
    ) -> Tensor:
        """Returns function(*weights), for weights returned by `gather`.

        The weights are in memory while the function runs and, if saves_weights, in backward while
        the last node of the function's graph, which saves them, runs.
        """


class ShardedModule(nn.Module):
    """A module whose own parameters are blocks of whole parameters.

    weight_source: the object that gathers the module's weights over z; None: the module's own ops
    gather them.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.weight_source: WeightSource | None = None
        self.specs: dict[str, ParameterSpec] = {}

    def add_parameter(
        self, name: str, spec: ParameterSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Registers this rank's block of the parameter, uninitialised.

        Raises ValueError, which names the module, the parameter and the numbers, if the grid does
        not divide the parameter.
        """
        try:
            _, sizes = self.grid.local_block(spec.full_sizes, spec.dims)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}.{name}: {error}") from None
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(sizes, dtype=dtype, device=device)))


@dataclass(frozen=True)
class Declaration:
    """How a grid treats the parameters of a plain module, without those of its submodules."""

    grid: Grid
    specs: Mapping[str, ParameterSpec]  # by the name within the module


def declare(module: nn.Module, grid: Grid, specs: Mapping[str, ParameterSpec]) -> None:
    """Declares how the grid treats a module's own parameters; the module keeps its class.

    The declaration is an attribute of the module, so copies of the module keep it. A later
    declaration replaces it.
    """
    setattr(module, _DECLARATION, Declaration(grid, dict(specs)))


def declaration_of(module: nn.Module) -> Declaration | None:
    """Returns how a grid treats the module's own parameters; None if undeclared."""
    if isinstance(module, ShardedModule):
        return Declaration(module.grid, module.specs)
    found = getattr(module, _DECLARATION, None)
    assert found is None or isinstance(found, Declaration)
    return found


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a tree of modules, with its full name."""

    name: str
    parameter: nn.Parameter
    spec: ParameterSpec
    grid: Grid

    def whole(self, block: Tensor) -> Tensor:
        """Returns the whole tensor, without padding, given each rank's block.

        Collectives: an all-gather over every axis that splits it.
        """
        return self.spec.without_padding(self.grid.unshard(block, self.spec.dims))

    def block(self, whole: Tensor) -> Tensor:
        """Returns this rank's zero-padded block of a whole tensor without padding."""
        return self.grid.shard(self.spec.with_padding(whole), self.spec.dims)

    def own_rows(self) -> int:
        """Returns the number of rows at the start of the block that are not padding."""
        if not self.spec.padding:
            return len(self.parameter)
        offsets, sizes = self.grid.local_block(self.spec.full_sizes, self.spec.dims)
        return min(max(self.spec.state_sizes[0] - offsets[0], 0), sizes[0])


def sharded_parameters(module: nn.Module) -> Iterator[ShardedParameter]:
    """Yields every parameter of `module` and its submodules once, tied ones under the first name.

    Raises ValueError for a parameter of a module that is neither a ShardedModule nor declared,
    because the axes over which its gradient must be summed are unknown.
    """
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full_name = f"{prefix}.{name}" if prefix else name
            declared = declaration_of(owner)
            if declared is None or name not in declared.specs:
                raise ValueError(
                    f"parameter {full_name} belongs to a {type(owner).__name__}, which does not "
                    "say how the grid splits it; use the modules of axonn_ext.nn, or construct it "
                    "inside auto_parallelize"
                )
            yield ShardedParameter(full_name, parameter, declared.specs[name], declared.grid)


def axes_left(p: ShardedParameter) -> tuple[str, ...]:
    """Returns the axes over which a gradient must still be summed after backward, in order."""
    return tuple(a for a in SUM_ORDER if a in p.spec.summed_over and p.grid.size(a) > 1)


@torch.no_grad()
def initialize(module: nn.Module, *, seed: int, prefix: str = "") -> None:
    """Sets every parameter of `module` to its initial values, the same on every grid.

    prefix: the name of `module` in the model, if it is part of one. This needs no communication and
    no memory beyond the parameters.

    The value of an element depends only on the seed, the parameter's full name and the index in the
    whole tensor: Philox-4x32-10, with the index as counter, drawn in fp32 and cast. Values are
    bitwise equal on every grid of one backend and one kind of processor (the normal distribution
    uses the C library's logarithm and sine).

    Raises ValueError, before it changes anything, for a parameter with an unknown distribution,
    which auto_parallelize or parallelize took from another module.
    """
    parameters = list(sharded_parameters(module))
    unknown = [p.name for p in parameters if p.spec.init is None]
    if unknown:
        raise ValueError(
            f"initialize: the distribution of {unknown[0]} is not known (nor of "
            f"{len(unknown) - 1} other parameters), since its values came from another module"
        )
    for p in parameters:
        init = p.spec.init
        assert init is not None
        if init.distribution == "constant":
            p.parameter.fill_(init.a)
            continue
        offsets, _ = p.grid.local_block(p.spec.full_sizes, p.spec.dims)
        name = f"{prefix}.{p.name}" if prefix else p.name
        torch.ops.axonn.fill_random_(
            p.parameter, p.spec.full_sizes, offsets, name, seed, init.distribution, init.a, init.b
        )
        if p.spec.padding:
            p.parameter[p.own_rows() :].zero_()


def rows_over(layout: str, axis: str) -> tuple[str, ...]:
    """Returns the axes that split the rows of an activation, with `axis` only in `sharded`."""
    return ("data", "z", axis) if layout == "sharded" else ("data", "z")


def own_rows(whole: Tensor, axis_rank: int, axis_size: int) -> Tensor:
    """Returns this rank's block of the rows of a whole tensor."""
    rows = whole.shape[0] // axis_size
    return whole.narrow(0, axis_rank * rows, rows)
