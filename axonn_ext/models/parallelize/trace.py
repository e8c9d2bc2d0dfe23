"""Traces which module feeds which in one forward pass, and so finds the layout of every input.

The pass runs the plain model on small inputs. A TorchDispatchMode records for each tensor the units
(Linears, embeddings, norms, plain modules) from whose outputs it was computed. A unit's input must
have one layout: that in which these outputs leave. A Linear that reads features over y is an expand
Linear, one that reads features over x a contract Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_ext.models.parallelize.results import Key, tensors_of
from axonn_ext.models.parallelize.units import Unit
from axonn_ext.ranks.grid import Grid

# An output of a unit: the unit's name and the output's index.
Source = tuple[str, int]
Values = dict[int | str, Tensor]  # arguments of a call
READS = {"expand": "y", "contract": "x", "norm": "y", "head_norm": "x"}
LEAVES = {
    "expand": "x", "contract": "y", "norm": "y", "head_norm": "x", "embedding": "y", "table": "y",
}  # fmt: skip


@dataclass(frozen=True)
class Output:
    """An output of the plain model.

    layout       its layout on the grid without conversion
    is_features  whether its last dim is that of the modules that it was computed from; false for
                 keys and values, which are split by heads
    """

    tensor: Tensor
    layout: str
    is_features: bool


@dataclass
class Flow:
    """The result of a traced forward pass.

    kinds     the kind of every unit that was called
    arrives   by unit: the layouts of its tensor arguments, by position or name
    forced    by source: the layout in which it must leave, if not the natural one
    problems  by unit: why it cannot be placed
    outputs   the tensors of the model's own output, by place
    values    by unit and call: copies of its inputs that were computed from other units
    cuts      by Linear: the features at which code cuts its output into parts, as q, k and v
    """

    kinds: dict[str, str] = field(default_factory=dict)
    arrives: dict[str, dict[int | str, str]] = field(default_factory=dict)
    forced: dict[Source, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    outputs: dict[Key, Output] = field(default_factory=dict)
    values: dict[str, list[Values]] = field(default_factory=dict)
    cuts: dict[str, set[int]] = field(default_factory=dict)

    def leaves(self, source: Source) -> str:
        """The layout in which an output leaves its unit."""
        natural = LEAVES.get(self.kinds.get(source[0], "plain"), "whole")
        return self.forced.get(source, natural)

    def sections(self, unit: Unit, num_x: int) -> tuple[int, ...]:
        """Returns the sizes of the parts of a fused Linear's output, each of which x splits.

        Empty if it is not split over x, is not cut, or x does not divide the parts.
        """
        cuts = self.cuts.get(unit.name, set()) - {0, unit.features[1]}
        if num_x == 1 or not cuts or self.kinds[unit.name] != "expand":
            return ()
        edges = [0, *sorted(cuts), unit.features[1]]
        sizes = tuple(end - start for start, end in pairwise(edges))
        divides = not any(size % num_x for size in sizes)
        return sizes if divides and self.leaves((unit.name, 0)) == "x" else ()


def trace(
    call: Callable[[], object], units: Mapping[str, Unit], grid: Grid, problems: Mapping[str, str]
) -> Flow:
    """Returns how tensors flow between the units while `call` runs the model.

    problems: units that are known to stay plain. The pass is repeated if the output of a unit must
    leave in another layout than assumed, or if a unit turns out to stay plain.
    """
    forced: dict[Source, str] = {}
    known = dict(problems)
    while True:
        tracer = _Tracer(units, grid, forced, known)
        try:
            tracer.run(call)
        except _Again:
            continue
        return tracer.flow


class Refused(ValueError):
    """No placement fits the traced data flow."""


class _Again(Exception):
    """An assumption turned out to be wrong."""


class _Tracer(TorchDispatchMode):
    def __init__(
        self,
        units: Mapping[str, Unit],
        grid: Grid,
        forced: dict[Source, str],
        problems: dict[str, str],
    ) -> None:
        super().__init__()
        self.units, self.grid = units, grid
        self.flow = Flow(forced=forced, problems=problems)
        self._depth = 0  # nesting depth of units in the pass
        self._sources: Any = WeakTensorKeyDictionary()
        self._outputs: Any = WeakTensorKeyDictionary()  # the Linear whose output a tensor is
        self._read: set[Source] = set()

    def run(self, call: Callable[[], object]) -> None:
        handles = []
        for unit in self.units.values():
            handles += [
                unit.module.register_forward_pre_hook(self._enter(unit), with_kwargs=True),
                unit.module.register_forward_hook(self._leave(unit)),
            ]
        try:
            with torch.no_grad(), self:
                output = call()
        finally:
            for handle in handles:
                handle.remove()
        tensors = {
            key: tensor for key, tensor in tensors_of(output).items() if tensor.is_floating_point()
        }
        self._settle_results([self._sources_of(tensor) for tensor in tensors.values()])
        for key, tensor in tensors.items():
            sources = self._sources_of(tensor)
            layouts = {self.flow.leaves(source) for source in sources}
            widths = {self.units[name].features[1] for name, _ in sources}
            layout = layouts.pop() if len(layouts) == 1 else "whole"
            self.flow.outputs[key] = Output(tensor, layout, widths == {tensor.shape[-1]})

    def _settle_results(self, outputs: list[set[Source]]) -> None:
        """Makes outputs that no unit reads leave whole, since they are results of the model.

        An output that is added to something that units read, as at the end of a residual stream,
        leaves in the layout of the latter.
        """
        for sources in outputs:
            layouts = {self.flow.leaves(source) for source in sources & self._read}
            if layouts:
                common = "y" if "y" in layouts else min(layouts)
                for source in sources - self._read:
                    self.flow.forced.setdefault(source, common)
        for name, kind in self.flow.kinds.items():
            if kind != "plain" and (name, 0) not in self._read:
                self.flow.forced.setdefault((name, 0), "whole")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if self._depth or name.startswith("new_") or name.endswith("_like"):
            return result  # new_zeros and zeros_like use only the shape
        if args and isinstance(args[0], Tensor) and args[0] in self._outputs:
            linear = self._outputs[args[0]]
            self.flow.cuts.setdefault(linear, set()).update(_cuts(name, args))
        sources: set[Source] = set()
        for tensor in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(tensor, Tensor):
                sources |= self._sources_of(tensor)
        if sources:
            for tensor in tree_flatten(result)[0]:
                if isinstance(tensor, Tensor):
                    self._sources[tensor] = sources
        return result

    def _sources_of(self, tensor: Tensor) -> set[Source]:
        found: set[Source] = self._sources.get(tensor, set())
        return found

    def _enter(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._depth += 1
            if self._depth == 1:
                arguments: dict[int | str, object] = dict(enumerate(args))
                arguments.update(kwargs)
                self._arrive(unit, arguments)

        return hook

    def _leave(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            self._depth -= 1
            if self._depth == 0:
                for index, tensor in enumerate(tree_flatten(output)[0]):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        self._sources[tensor] = {(unit.name, index)}
                if unit.family == "linear" and isinstance(output, Tensor):
                    self._outputs[output] = unit.name

        return hook

    def _arrive(self, unit: Unit, arguments: Mapping[int | str, object]) -> None:
        """Determines the layouts of the unit's arguments, and its kind."""
        layouts: dict[int | str, str] = {}
        values: Values = {}
        for key, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                sources = self._sources_of(value)
                self._read |= sources
                layouts[key] = self._common_layout(unit, sources)
                if sources:
                    values[key] = value.clone()  # code may change it in place later
                if sources and layouts[key] != "whole":
                    self._check_norm(unit, value, sources, layouts[key])
                    self._check_widths(unit, value, sources, layouts[key])
        self.flow.values.setdefault(unit.name, []).append(values)
        kind = self._kind(unit, layouts)
        before = self.flow.kinds.setdefault(unit.name, kind)
        known = self.flow.arrives.setdefault(unit.name, layouts)
        if (before, known) != (kind, layouts):
            self._fail(unit, "it is called several times, with inputs of different layouts")

    def _common_layout(self, unit: Unit, sources: set[Source]) -> str:
        """Returns the layout of a tensor computed from these sources; "whole" for none."""
        found = {source: self.flow.leaves(source) for source in sources}
        layouts = set(found.values())
        if len(layouts) <= 1:
            return layouts.pop() if layouts else "whole"
        # Tensors of different layouts met on the way, as in x + Linear(x).
        common = "y" if "y" in layouts else "x"
        for source, layout in found.items():
            if layout != common:
                if source in self.flow.forced:
                    names = ", ".join(sorted({name for name, _ in found}))
                    self._fail(unit, f"its input mixes features in different layouts, of {names}")
                self.flow.forced[source] = common
        raise _Again

    def _kind(self, unit: Unit, layouts: Mapping[int | str, str]) -> str:
        if unit.name in self.flow.problems:
            return "plain"
        kind = unit.asked or unit.family
        if kind == "linear":
            reads_x = next(iter(layouts.values()), "whole") == "x"
            kind = "contract" if reads_x and not unit.is_head else "expand"
        if kind != "plain":
            problem = unit.problem(kind, self.grid)
            if problem:
                self._fail(unit, problem)
        return kind

    def _check_norm(self, unit: Unit, value: Tensor, sources: set[Source], layout: str) -> None:
        """Refuses a norm over a head's features: it reads fewer features than its sources wrote."""
        if not unit.is_norm or (unit.family == "head_norm" and layout == "x"):
            return
        for name, _ in sources:
            source = self.units[name]
            if source.family == "linear" and source.features[1] != value.shape[-1]:
                if unit.name in self.flow.problems and self.grid.size(layout) == 1:
                    return  # nothing is gathered for it
                self._fail(unit, f"it normalises parts of the features of {name}, such as heads")

    def _check_widths(self, unit: Unit, value: Tensor, sources: set[Source], layout: str) -> None:
        """Raises ValueError if different numbers of features meet in the residual stream.

        A block of few features, as of a gate, does not fit a block of many. Over x, the number of
        heads may differ, as for queries and keys.
        """
        if layout != "y" or self.grid.size("y") == 1 or unit.is_norm:
            return
        sizes = {self.units[name].features[1]: name for name, _ in sources}
        others = {size: name for size, name in sizes.items() if size not in (0, value.shape[-1])}
        if others and value.shape[-1] in sizes:
            size, name = next(iter(others.items()))
            raise Refused(
                f"parallelize: the input of {unit.name} ({unit.what}), of {value.shape[-1]} "
                f"features, is computed from the {size} features of {name}, too, and "
                f"y={self.grid.size('y')} splits both; let the plan make a module around them "
                '"plain"'
            )

    def _fail(self, unit: Unit, problem: str) -> None:
        """Records that the unit stays plain, and restarts the trace.

        All units that share its weight stay plain, too. Raises ValueError if it is already plain.
        """
        if unit.name in self.flow.problems:
            raise Refused(
                f"parallelize: {unit.name} ({unit.what}) cannot even stay plain: {problem}; let "
                'the plan make a module around it "plain"'
            )
        own = {id(p) for p in unit.module.parameters()}
        for other in self.units.values():
            if other is not unit and own & {id(p) for p in other.module.parameters()}:
                self.flow.problems[other.name] = f"it shares its weight with {unit.name}"
        self.flow.problems[unit.name] = problem
        raise _Again


def _cuts(op: str, args: Any) -> set[int]:
    """Returns the features at which an aten op cuts its first argument into parts."""
    tensor, *rest = args
    last, features = tensor.dim() - 1, tensor.shape[-1]
    dim = rest[1] if len(rest) > 1 else 0
    if op in ("split", "split_with_sizes") and dim % tensor.dim() == last:
        sizes = rest[0]
        return {*range(0, features, sizes)} if isinstance(sizes, int) else {*accumulate(sizes)}
    if op == "slice" and rest and rest[0] % tensor.dim() == last:
        first, end = (*rest[1:3], None, None)[:2]
        return {min(max(at + features if at < 0 else at, 0), features)
                for at in (first or 0, features if end is None else end)}  # fmt: skip
    # As in view(B, T, 3, heads, D); with 3 heads, view(B, T, heads, 3, D) looks alike.
    if op == "view" and list(rest[0][:last]) == [*tensor.shape[:-1]]:
        parts = rest[0][last:]
        if len(parts) > 2 and parts[0] == 3:
            return {features // 3, 2 * features // 3}
    return set()
