"""Puts a whole model on a grid, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from axonn_ext.models.parallelize.agreement import SameInputs, agree_on_parameters, agreement
from axonn_ext.models.parallelize.attention import is_unknown
from axonn_ext.models.parallelize.checking import check_outputs, plan_for
from axonn_ext.models.parallelize.copies import SameCopies
from axonn_ext.models.parallelize.dropout import refuse_dropout, refuse_random
from axonn_ext.models.parallelize.examples import (
    ExampleInputs,
    evaluating,
    facts_of,
    make_call,
    without_zeros,
)
from axonn_ext.models.parallelize.placing import Placing
from axonn_ext.models.parallelize.plan import KINDS, Placement, Plan, keep_plan
from axonn_ext.models.parallelize.rehearsal import choose_attentions
from axonn_ext.models.parallelize.results import shown
from axonn_ext.models.parallelize.trace import Flow, Refused, trace
from axonn_ext.models.parallelize.units import Unit, find_units, own_parameters
from axonn_ext.nn.sharded import declaration_of
from axonn_ext.ranks.grid import Grid

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def parallelize(
    module: ModuleT,
    grid: Grid,
    plan: Plan | Mapping[str, str] | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
    leave_plain: bool = False,
    verbose: bool = True,
) -> ModuleT:
    """Splits a transformers model, or any tree of modules, in place; returns the same object.

    Linears and transformers' Conv1D become expand or contract Linears, embeddings and norms those
    of axonn_ext.nn, in layout "replicated". A rank passes all rows of its (data, z) group, which
    must be equal on x and y, and gets the whole outputs, equal on x and y:

        ids     [B, S]      token ids, or rows of features [..., K]
        inside  [B, S, H / Gy] between layers; [B, S, heads / Gx, D] in attention
        logits  [B, S, V]

    Names, module and parameter objects, and the model's class stay the same. `full_state_dict` has
    the model's own names and layouts. Gradients are summed over z and data by `sync_gradients`, so
    a loss must be divided by the rows of all (data, z) groups: see
    `global_mean(..., axes=("z", "data"))`. Dropout must be 0.

    The whole model must be on every rank, and equal. It is first run unchanged on small inputs, to
    see which module feeds which: a Linear that reads the residual stream is an expand Linear, one
    that reads the output of an expand Linear a contract Linear. It is run again at the end, where
    the inputs of each module and the outputs must be the same, which detects code that works across
    features. A pass in training mode finds modules that draw random numbers.

    Args:
        plan: kinds by module name ("expand", "contract", "embedding", "table", "norm", "plain",
            "local_heads" for an attention that each rank runs on its own heads), which override the
            inferred ones; or a Plan, from `plan_of` another model.
        example_inputs: positional or named inputs of the model; default token ids, or rows.
        leave_plain: modules that cannot be placed stay plain, with whole inputs and outputs.
        verbose: rank 0 prints the plan; `plan_of(module)` returns it.

    Collectives: those of one forward pass. Ranks compare values through the c10d store. In the
    first call of the model, and the first with or without gradients, the ranks of x and y compare
    the tensor arguments, and all of them raise RuntimeError if these differ.

    Raises, on every rank:
        TypeError: grid is not a Grid, or module not a module.
        ValueError: modules cannot be placed (all are named, with reasons and numbers), unless
            leave_plain is set; the plan names an unknown module or kind; there is dropout; the
            module is already on a grid; the example inputs do not fit the model.
        RuntimeError: ranks have different models or plans, or one of them raised; the model
            computes different results afterwards.
    Source: AxoNN, arXiv:2502.08145, section 3.
    """
    if not isinstance(grid, Grid):
        raise TypeError(f"parallelize: grid must be a Grid, got {type(grid).__name__}")
    grid.shape.refuse_pipe("parallelize")
    with agreement(what="parallelize") as facts:
        asked = _check_arguments(module, plan)
        refuse_dropout(module)
        facts["the plan that is asked for"] = str(sorted(asked.items()))
        facts["leave_plain"] = str(leave_plain)
        facts |= facts_of(example_inputs)
    agree_on_parameters(list(module.named_parameters()), what="parallelize")
    with evaluating(module), without_zeros(module):
        with agreement(what="parallelize") as facts:
            call = make_call(module, find_units(module, grid, asked, {}), example_inputs)
            _on_examples(lambda guarded: refuse_random(module, guarded), call)
            units, flow = _settle(module, grid, asked, call, leave_plain=leave_plain)
            attentions, _ = choose_attentions(module, call, units, flow, asked, grid)
            made = _plan_of(units, flow, asked, grid)
            facts["the plan"] = str(made)
            facts["how attentions run"] = str(sorted(attentions.items()))
        Placing(module, units, flow, attentions, grid).place()
        with agreement(what="parallelize"):
            check_outputs(module, call, units, flow, grid)
    if grid.num_parts(("y", "x")) > 1:
        module.register_forward_pre_hook(SameInputs(grid), with_kwargs=True)
    if grid.world_size > 1:
        module.register_forward_pre_hook(SameCopies(grid))
    keep_plan(module, made)
    if verbose and grid.rank == 0:
        print(made)
    return module


def _check_arguments(module: nn.Module, plan: Plan | Mapping[str, str] | None) -> dict[str, str]:
    """Returns the kinds that the plan requests, by module name."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: module must be a Module, got {type(module).__name__}")
    for name, child in module.named_modules():
        if declaration_of(child) is not None:
            raise ValueError(f"parallelize: {name or 'the module'} is on a grid already")
        if any(p.is_meta for p in own_parameters(child).values()):
            raise ValueError(f"parallelize: {name} is on the meta device, and has no values")
    if not any(True for _ in module.parameters()):
        raise ValueError("parallelize: module must have parameters, got none")
    if isinstance(plan, Plan):
        plan = plan.kinds()
    names = {name for name, _ in module.named_modules()}
    for name, kind in (plan or {}).items():
        if name not in names:
            raise ValueError(f"parallelize: plan names an unknown module, {name!r}")
        if kind not in KINDS:
            raise ValueError(
                f"parallelize: plan[{name!r}] must be one of {', '.join(KINDS)}, got {kind!r}"
            )
    return dict(plan or {})


def _settle(
    module: nn.Module,
    grid: Grid,
    asked: Mapping[str, str],
    call: Callable[[], object],
    *,
    leave_plain: bool,
) -> tuple[dict[str, Unit], Flow]:
    """Returns the units and their data flow. Raises ValueError for units that cannot be placed."""
    plain: dict[str, str] = {}
    while True:
        units = find_units(module, grid, asked, plain)
        flow = _traced(call, units, grid)
        problems = {n: why for n, why in flow.problems.items() if asked.get(n) != "plain"}
        if problems and not leave_plain:
            lines = [
                f"  {n or 'the module'} ({units[n].what}): {why}"
                for n, why in sorted(problems.items())
            ]
            raise ValueError(
                f"parallelize: {len(lines)} modules cannot be placed on {grid.shape.short()}; with "
                "leave_plain=True they stay as they are:\n"
                + "\n".join(lines)
                + _advice(module, grid, asked, call, units, problems)
            )
        # An attention works on local heads with all of its projections or with none.
        broken = {p: f"{n}: {why}" for n, why in problems.items() for p in units[n].parents}
        if not broken:
            return units, flow
        plain |= broken


def _advice(
    module: nn.Module,
    grid: Grid,
    asked: Mapping[str, str],
    call: Callable[[], object],
    units: Mapping[str, Unit],
    problems: Mapping[str, str],
) -> str:
    """Returns a line about unknown attentions: the plan with which they run; "" if there are none.

    It was rehearsed that each rank can run a part of the heads, unless the plan makes them plain.
    """
    names = [name for name in problems if is_unknown(units[name].module)]
    if not names:
        return ""
    modules = dict(module.named_modules())
    kinds = ", ".join(dict.fromkeys(type(modules[name]).__name__ for name in names))
    asked = {**asked, **dict.fromkeys(names, "local_heads")}
    try:
        units = find_units(module, grid, asked, {})
        flow = _traced(call, units, grid)
        _, problem = choose_attentions(module, call, units, flow, asked, grid)
        new = [f"{name}: {why}" for name, why in flow.problems.items() if name not in problems]
        problem = "; ".join(new[:1]) or problem
    except Refused as error:
        problem = str(error)
    if not problem:
        plan = plan_for(names, "local_heads", modules)
        return f"\n{kinds} can run on a part of the heads; let each rank run its own by plan={plan}"
    plan = plan_for(names, "plain", modules)
    return f"\n{kinds} cannot run on a part of the heads ({problem}); make it plain by plan={plan}"


def _traced(call: Callable[[], object], units: Mapping[str, Unit], grid: Grid) -> Flow:
    plain = {name: unit.reason for name, unit in units.items() if unit.family == "plain"}
    flow = _on_examples(lambda guarded: trace(guarded, units, grid, plain), call)
    for name in units.keys() - flow.kinds.keys():
        flow.problems.setdefault(name, "the example inputs do not reach it")
    return flow


def _on_examples(function: Callable[[Callable[[], object]], T], call: Callable[[], object]) -> T:
    """Returns function(call). Raises ValueError if `call`, which runs the model, fails."""
    reached: list[Exception] = []

    def guarded() -> object:
        try:
            return call()
        except Exception as error:  # from third-party code or the function's hooks
            reached.append(error)
            raise

    try:
        return function(guarded)
    except Exception as error:
        if error not in reached or isinstance(error, Refused):
            raise
        raise ValueError(
            "parallelize: the model does not run on the example inputs; pass example_inputs that "
            f"it accepts: {type(error).__name__}: {error}"
        ) from error


def _plan_of(units: Mapping[str, Unit], flow: Flow, asked: Mapping[str, str], grid: Grid) -> Plan:
    placements = {}
    for name, unit in units.items():
        reason = flow.problems.get(name, "")
        kind = "plain" if reason else flow.kinds[name]
        arrives = "/".join(dict.fromkeys(flow.arrives.get(name, {}).values()))
        if kind in ("embedding", "table"):
            arrives = ""  # other arguments, such as a mask, have no features
        placements[name] = Placement(kind, unit.what, arrives, flow.leaves((name, 0)), reason)
    parts: dict[tuple[str, str], list[str]] = {}  # e.g. the keys and values of every layer
    for key, output in flow.outputs.items():
        if output.layout != "whole" and not output.is_features:
            parts.setdefault((shown(key[:1]), output.layout), []).append(shown(key))
    notes = tuple(
        f"output {keys[0] if len(keys) == 1 else f'{top} ({len(keys)} tensors)'}: this rank's "
        f"part, split over {layout}"
        for (top, layout), keys in parts.items()
    )
    local = tuple(name for name, kind in asked.items() if kind == "local_heads")
    return Plan(grid.shape.short(), placements, notes, local)
