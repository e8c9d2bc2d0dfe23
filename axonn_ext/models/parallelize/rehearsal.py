"""Finds how attentions run on local heads, in rehearsals on the plain model.

In a rehearsal the plain model runs as on a rank of the grid, but without communication. Each unit
gets its whole input of the trace, and its output is cut to that rank's block. So all code between
the units sees what it would see on the grid, before anything is changed. Every rank rehearses for
all ranks of x, so that all find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from axonn_ext.models.parallelize.attention import (
    LocalHeads,
    fused_order,
    is_unknown,
    known,
    use_local_heads,
    ways,
)
from axonn_ext.models.parallelize.checking import containers_of, difference, origin
from axonn_ext.models.parallelize.trace import Flow
from axonn_ext.models.parallelize.units import Unit, is_inside
from axonn_ext.ranks.grid import Grid

Call = Callable[[], object]
Arguments = dict[int | str, Any]


@torch.no_grad()
def choose_attentions(
    model: nn.Module,
    call: Call,
    units: Mapping[str, Unit],
    flow: Flow,
    asked: Mapping[str, str],
    grid: Grid,
) -> tuple[dict[str, LocalHeads], str]:
    """Returns how attentions run on local heads, by name, and what is wrong then, if anything.

    They are known classes, those of the plan, and with x=1, where all heads are local, any other
    that is split over y.
    """
    chosen: dict[str, LocalHeads] = {}
    for unit in units.values():
        for name, module in unit.parents.items():
            how = known(module)
            assert how is not None
            chosen[name] = LocalHeads(how.divided)
    num_x = grid.size("x")
    names = [name for name, kind in asked.items() if kind == "local_heads" and name not in chosen]
    if num_x == 1:
        found = {n: m for n, m in model.named_modules() if is_unknown(m) and n not in chosen}
        names = [*found] if grid.size("y") > 1 else []
    if not names:
        return chosen, ""
    shown = _shown(model, call, units, names)
    left = {name: _ways(model, name, units, flow, shown[name], num_x) for name in names}
    first = {name: found[0] for name, found in left.items()}
    while True:
        trial = chosen | {name: found[0] for name, found in left.items()}
        for part in range(num_x):
            wrong, problem = Rehearsal(model, units, flow, trial, grid, part).run(call)
            if problem:
                break
        around = [[name for name in names if is_inside(other, name)] for other in wrong]
        kinds = {type(model.get_submodule(max(found, key=len))) for found in around if found}
        if not kinds:
            return trial, problem
        for name in names:
            if type(model.get_submodule(name)) in kinds:
                del left[name][0]
        if not all(left.values()):
            return chosen | first, problem


def _ways(
    model: nn.Module,
    name: str,
    units: Mapping[str, Unit],
    flow: Flow,
    shown: Mapping[int | str, int],
    num_x: int,
) -> list[LocalHeads]:
    sizes: set[int] = set()
    for unit in units.values():
        if is_inside(unit.name, name) and unit.is_linear and unit.family == "linear":
            sizes |= {*unit.features, *flow.sections(unit, num_x)}
    features = next(iter(shown.values()), 0)
    module = model.get_submodule(name)
    return ways(module, features=features, sizes=sizes, shown=shown, num_x=num_x)


def _shown(
    model: nn.Module, call: Call, units: Mapping[str, Unit], names: Sequence[str]
) -> dict[str, dict[int | str, int]]:
    """Returns the arguments of attentions that units inside read as they are, with their widths."""
    found: dict[str, dict[int | str, int]] = {name: {} for name in names}
    given: dict[str, Arguments] = {}
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[name] = _tensors(args, kwargs)

        return hook

    def read(unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name in names:
                if is_inside(unit.name, name):
                    for key, argument in given.get(name, {}).items():
                        if any(value is argument for value in _tensors(args, kwargs).values()):
                            found[name][key] = argument.shape[-1]

        return hook

    try:
        for name in names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        for unit in units.values():
            handles.append(unit.module.register_forward_pre_hook(read(unit), with_kwargs=True))
        call()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Tensor]:
    arguments: Arguments = dict(enumerate(args)) | kwargs
    return {key: value for key, value in arguments.items() if isinstance(value, Tensor)}


class Rehearsal:
    """A run of the plain model in which the code between units sees the blocks of one rank.

    part: the rank's place along x; it is the first along y.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, Unit],
        flow: Flow,
        attentions: Mapping[str, LocalHeads],
        grid: Grid,
        part: int,
    ) -> None:
        self.model, self.units, self.flow = model, units, flow
        self.attentions, self.grid, self.parts = attentions, grid, {"x": part, "y": 0}
        self.wrong: dict[str, str] = {}  # what is wrong, by the module in which it is
        self._depth = 0  # nesting depth of units in the pass, as in the trace

    def run(self, call: Call) -> tuple[list[str], str]:
        """Returns the modules whose code computes something else, and what of the first."""
        handles: list[torch.utils.hooks.RemovableHandle] = []
        before: list[tuple[nn.Module, str, int]] = []
        containers = containers_of(self.model, self.units)
        try:
            for name, way in self.attentions.items():
                module = self.model.get_submodule(name)
                before += [(module, key, getattr(module, key)) for key in way.divided]
                inside = [u.module for u in self.units.values() if is_inside(u.name, name)]
                handles += use_local_heads(module, way, inside, self.grid.size("x"))
            for unit in self.units.values():
                handles += [
                    unit.module.register_forward_pre_hook(self._enter(unit), with_kwargs=True),
                    unit.module.register_forward_hook(self._leave(unit)),
                ]
            call()
        except Exception as error:  # from third-party code
            name, line = origin(error, containers)
            self.wrong.setdefault(name, f"{line}: {type(error).__name__}: {error}")
        finally:
            for handle in handles:
                handle.remove()
            for module, key, value in before:
                setattr(module, key, value)
        return [*self.wrong], next(iter(self.wrong.values()), "")

    def _enter(self, unit: Unit) -> Callable[..., Any]:
        expected = iter(self.flow.values.get(unit.name, []))
        arrives = self.flow.arrives.get(unit.name, {})

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._depth += 1
            if self._depth > 1:
                return None
            found: Arguments = dict(enumerate(args)) | kwargs
            for key, whole in next(expected, {}).items():
                got = found.get(key)
                want = self._block(whole, arrives[key], unit)
                problem = difference(got, want) if isinstance(got, Tensor) else "is missing"
                if problem:
                    self.wrong.setdefault(unit.name, f"the input of {unit.name} {problem}")
                found[key] = whole.clone()  # code may change it in place
            return tuple(found.pop(place) for place in range(len(args))), found

        return hook

    def _leave(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: object, output: object) -> object:
            self._depth -= 1
            if self._depth:
                return None
            tensors, structure = tree_flatten(output)
            for index, tensor in enumerate(tensors):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    layout = self.flow.leaves((unit.name, index))
                    tensors[index] = self._block(self._ordered(tensor, unit), layout, unit)
            return tree_unflatten(tensors, structure)

        return hook

    def _ordered(self, output: Tensor, unit: Unit) -> Tensor:
        num_x = self.grid.size("x")
        sections = self.flow.sections(unit, num_x)
        return output[..., fused_order(sections, num_x)] if sections else output

    def _block(self, whole: Tensor, layout: str, unit: Unit) -> Tensor:
        if layout == "whole":
            return whole
        dim = -2 if unit.family == "head_norm" else -1  # heads, or features
        size = whole.shape[dim] // self.grid.size(layout)
        return whole.narrow(dim, self.parts[layout] * size, size).contiguous()
