"""Replaces the modules of a model according to the traced data flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from axonn_ext.models.parallelize.attention import LocalHeads, fused_order, use_local_heads
from axonn_ext.models.parallelize.become import become, set_values
from axonn_ext.models.parallelize.modules import (
    ConvertInputs,
    ConvertOutputs,
    GatherResults,
    PlacedEmbedding,
    PlacedLinear,
)
from axonn_ext.models.parallelize.trace import LEAVES, READS, Flow
from axonn_ext.models.parallelize.units import Unit, is_inside, is_transposed, own_parameters
from axonn_ext.nn.sharded import ParameterSpec, ShardedModule, declaration_of, declare
from axonn_ext.ranks.grid import Grid

_GROUPS = ("z", "data")  # the axes over which ranks have different rows


class Placing:
    """Replaces the units of a model. attentions: those that run on local heads, by name."""

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, Unit],
        flow: Flow,
        attentions: Mapping[str, LocalHeads],
        grid: Grid,
    ) -> None:
        self.model, self.units, self.flow, self.grid = model, units, flow, grid
        self.attentions = attentions
        self.specs: dict[int, ParameterSpec] = {}  # of placed parameters, by id

    def place(self) -> None:
        for unit in self.units.values():
            if unit.name in self.flow.problems:
                self._leave_plain(unit)
            else:
                self._replace(unit, self.flow.kinds[unit.name])
        for name, way in self.attentions.items():
            inside = [u.module for u in self.units.values() if is_inside(u.name, name)]
            attention = self.model.get_submodule(name)
            use_local_heads(attention, way, inside, self.grid.size("x"))
        self._declare_the_rest()
        results = {
            key: (output.layout, output.tensor.shape[-1] // self.grid.size(output.layout))
            for key, output in self.flow.outputs.items()
            if output.layout != "whole" and output.is_features
        }
        if results:
            hook = GatherResults(self.grid, results, self.flow.outputs)
            self.model.register_forward_hook(hook)

    def _replace(self, unit: Unit, kind: str) -> None:
        weight = unit.module.weight
        assert isinstance(weight, nn.Parameter)
        split = unit.split(kind, self.grid, device=weight.device)
        if split is None:
            self._shrink_table(unit.module, weight)
        else:
            assert isinstance(split, ShardedModule)
            stored_as = self._prepare(unit, split)
            split.specs = {
                n: dataclasses.replace(spec, init=None, stored_as=stored_as)
                for n, spec in split.specs.items()
            }
            done = set(self.specs)
            for name, parameter in own_parameters(unit.module).items():
                self.specs[id(parameter)] = split.specs[name]
            become(unit.module, split, done=done)
        self._add_hooks(unit, READS.get(kind, ""), LEAVES[kind])

    def _prepare(self, unit: Unit, split: ShardedModule) -> str:
        """Chooses the class of the unit's replacement, and reorders whole values.

        Returns how the values then differ from the public ones, for checkpoints.
        """
        if isinstance(unit.module, nn.Embedding):
            split.__class__ = PlacedEmbedding
            split.padding_idx = unit.module.padding_idx  # type: ignore[assignment]
        num_x = self.grid.size("x")
        sections = self.flow.sections(unit, num_x)
        if not sections and not is_transposed(unit.module):
            return ""
        split.__class__ = PlacedLinear
        assert isinstance(split, PlacedLinear)
        stored_as = []
        if is_transposed(unit.module):
            split.transposed = True
            stored_as.append("transposed")
        if sections:
            split.order = fused_order(sections, num_x)
            stored_as.append(f"x={num_x}")
        parameters = own_parameters(unit.module)
        public = {name: p.detach() for name, p in parameters.items()}
        for name, values in split.import_state(public).items():
            set_values(parameters[name], values)
        return ",".join(stored_as)

    def _shrink_table(self, table: nn.Module, weight: nn.Parameter) -> None:
        """Keeps this rank's features of an embedding, which works with any forward of its class."""
        assert isinstance(table, nn.Embedding)
        spec = ParameterSpec(tuple(weight.shape), {1: ("y",)}, _GROUPS, None)
        set_values(weight, self.grid.shard(weight.detach(), spec.dims))
        table.embedding_dim = weight.shape[1]
        self.specs[id(weight)] = spec
        declare(table, self.grid, {"weight": spec})

    def _leave_plain(self, unit: Unit) -> None:
        for module in unit.module.modules():
            specs = {
                name: ParameterSpec(tuple(p.shape), {}, _GROUPS, None)
                for name, p in own_parameters(module).items()
            }
            if specs:
                declare(module, self.grid, specs)
                own = own_parameters(module)
                self.specs |= {id(own[name]): spec for name, spec in specs.items()}
        self._add_hooks(unit, "whole", "whole")

    def _add_hooks(self, unit: Unit, reads: str, natural: str) -> None:
        """Adds hooks that convert the unit's inputs and outputs between layouts."""
        arrives = self.flow.arrives.get(unit.name, {})
        moved = {key: have for key, have in arrives.items() if have != reads}
        if moved and reads:
            hook = ConvertInputs(self.grid, moved, reads)
            unit.module.register_forward_pre_hook(hook, with_kwargs=True)
        leaves = {
            index: want
            for (name, index), want in self.flow.forced.items()
            if name == unit.name and want != natural
        }
        if leaves:
            unit.module.register_forward_hook(ConvertOutputs(self.grid, natural, leaves))

    def _declare_the_rest(self) -> None:
        """Declares the parameters that a module shares with a unit inside it."""
        for module in self.model.modules():
            own = own_parameters(module)
            if own and declaration_of(module) is None:
                declare(module, self.grid, {n: self.specs[id(p)] for n, p in own.items()})
