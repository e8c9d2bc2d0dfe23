"""Compares a model on the grid with the plain one on the same small inputs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from axonn_ext.models.parallelize.layouts import own_block
from axonn_ext.models.parallelize.results import shown, tensors_of
from axonn_ext.models.parallelize.trace import READS, Flow
from axonn_ext.models.parallelize.units import Unit
from axonn_ext.ranks.grid import Grid


@torch.no_grad()
def check_outputs(
    model: nn.Module, call: Callable[[], object], units: Mapping[str, Unit], flow: Flow, grid: Grid
) -> None:
    """Raises RuntimeError if the inputs of units, or the model's outputs, have changed.

    Collectives: those of a forward pass.
    """
    containers = containers_of(model, units)
    arrivals = _Arrivals(units, flow, grid, containers)
    try:
        output = arrivals.run(call)
    except Exception as failure:  # it is third-party code
        name, line = origin(failure, containers)
        raise RuntimeError(
            f"parallelize: the model on the grid fails in {name or 'the model'} ({line}): "
            f"{type(failure).__name__}: {failure}\n{_advice(name, containers)}"
        ) from (None if line else failure)
    if arrivals.problems:
        raise RuntimeError(arrivals.problems[0])
    found, hint = tensors_of(output), _advice("", containers)
    for key, expected in flow.outputs.items():
        if expected.layout != "whole" and not expected.is_features:
            continue
        if key not in found:
            raise RuntimeError(f"parallelize: output {shown(key)} is missing on the grid\n{hint}")
        problem = difference(found[key], expected.tensor)
        if problem:
            raise RuntimeError(f"parallelize: output {shown(key)} {problem}\n{hint}")


def containers_of(model: nn.Module, units: Mapping[str, Unit]) -> dict[str, nn.Module]:
    """Returns the modules around units, by name. The plan can make them "plain"."""
    inside = {id(module) for unit in units.values() for module in unit.module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) not in inside and any(True for _ in module.parameters())
    }


def origin(failure: Exception, containers: Mapping[str, nn.Module]) -> tuple[str, str]:
    """Returns the innermost container in whose method the failure happened, and the line there."""
    names = {id(module): name for name, module in containers.items()}
    for frame, line in reversed([*traceback.walk_tb(failure.__traceback__)]):
        owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if id(owner) in names:
            return names[id(owner)], f"{Path(frame.f_code.co_filename).name}:{line}"
    return "", ""


def _advice(name: str, containers: Mapping[str, nn.Module]) -> str:
    """Returns what to do about code across features in the container of this name; "": unknown."""
    text = 'some code between the modules may work across features; let the plan make it "plain"'
    if name:
        kind, plan = type(containers[name]).__name__, plan_for([name], "plain", containers)
        text = f"the code of {name} ({kind}) may work across features; make it plain by plan={plan}"
    return (
        f"{text}, or use auto_parallelize, which splits the Linears of any code. The model is "
        "unusable now"
    )


def plan_for(names: Iterable[str], kind: str, modules: Mapping[str, nn.Module]) -> str:
    """Returns the Python of a plan that gives this kind to all modules of the named ones' classes.

    modules: all of the model's, by name.
    """
    plans = []
    for cls in dict.fromkeys(type(modules[name]).__name__ for name in names):
        alike = [name for name, module in modules.items() if type(module).__name__ == cls]
        plan = f'{{"{alike[0]}": "{kind}"}}'
        if len(alike) > 1:
            plan = (
                f'{{name: "{kind}" for name, module in model.named_modules() '
                f'if type(module).__name__ == "{cls}"}}'
            )
        plans.append(plan)
    return " | ".join(plans)


class _Arrivals:
    """Compares each unit's inputs with this rank's part of its inputs in the plain model.

    The pass continues after a difference, since other ranks may have none and wait for this one.
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        flow: Flow,
        grid: Grid,
        containers: Mapping[str, nn.Module],
    ) -> None:
        self.units, self.flow, self.grid, self.containers = units, flow, grid, containers
        self.problems: list[str] = []
        self._depth = 0  # nesting depth of units in the pass, as in the trace

    def run(self, call: Callable[[], object]) -> object:
        handles = []
        for unit in self.units.values():
            handles += [
                unit.module.register_forward_pre_hook(self._enter(unit), with_kwargs=True),
                unit.module.register_forward_hook(self._leave),
            ]
        try:
            return call()
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, unit: Unit) -> Callable[..., None]:
        expected = iter(self.flow.values.get(unit.name, []))
        plain = unit.name in self.flow.problems
        reads = "whole" if plain else READS.get(self.flow.kinds[unit.name], "")
        split = -2 if unit.family == "head_norm" else -1  # heads, or features
        parent = unit.name.rpartition(".")[0]
        while parent and parent not in self.containers:
            parent = parent.rpartition(".")[0]

        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._depth += 1
            if self._depth > 1 or not reads:
                return
            found: dict[int | str, object] = dict(enumerate(args))
            found.update(kwargs)
            for key, want in next(expected, {}).items():
                if reads != "whole":
                    want = own_block(want, self.grid.axis(reads), split)
                got = found.get(key)
                problem = difference(got, want) if isinstance(got, Tensor) else "is missing"
                if problem:
                    self.problems.append(
                        f"parallelize: the input of {unit.name} ({unit.what}) {problem}\n"
                        f"{_advice(parent, self.containers)}"
                    )

        return hook

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1


def difference(got: Tensor, want: Tensor) -> str:
    """Returns how the tensors differ beyond rounding; empty if they do not."""
    if got.shape != want.shape:
        return f"has shape {list(got.shape)} on the grid instead of {list(want.shape)}"
    limit = {torch.float64: 1e-9, torch.float32: 1e-3}.get(want.dtype, 0.1)
    difference = torch.where(got == want, 0, got - want)  # infinities of masks are equal
    error = (difference.norm() / want.norm().clamp(min=1e-30)).item()
    if error <= limit:
        return ""
    return f"differs by {error:.1e} on the grid (relative norm, limit {limit})"
