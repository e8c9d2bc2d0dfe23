"""Finds the units of a tree (modules that are placed as one), and their possible placements.

Legend: K and N in and out features of a Linear; V words and H features of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from axonn_ext.models.parallelize.attention import known, why_not_split
from axonn_ext.nn import Embedding, LayerNorm, Linear, RMSNorm
from axonn_ext.nn.norm import HeadNorm
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import ROLES

_KINDS_OF = MappingProxyType(
    {
        "linear": (*ROLES, "plain"),
        "embedding": ("embedding", "table", "plain"),
        "table": ("table", "plain"),
        "norm": ("norm", "plain"),
        "head_norm": ("head_norm", "plain"),
        "plain": ("plain",),
    }
)


@dataclass
class Unit:
    """A module that `parallelize` places as a whole.

    family    "linear", "embedding", "table", "norm", "head_norm" or "plain"
    what      its class and sizes
    reason    why it is plain
    features  K and N of a Linear, V and H of an embedding, twice the features of a norm; for a head
              norm those of a head, and 0, since its outputs are no features of the model
    asked     the kind that the caller's plan gives it; empty: none
    is_head   whether it shares an embedding's weight, so that it must be an expand Linear
    parents   the known attentions that contain it, by name
    """

    name: str
    module: nn.Module
    family: str
    what: str
    reason: str = ""
    features: tuple[int, int] = (0, 0)
    asked: str = ""
    is_head: bool = False
    parents: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def is_linear(self) -> bool:
        return type(self.module) is nn.Linear or is_transposed(self.module)

    @property
    def is_norm(self) -> bool:
        return type(self.module).__name__.endswith("Norm")

    def problem(self, kind: str, grid: Grid) -> str:
        """Returns why the grid cannot split the unit as this kind; empty if it can."""
        try:
            self.split(kind, grid, device="meta")
        except ValueError as error:
            return str(error)
        return ""

    def split(self, kind: str, grid: Grid, *, device: torch.device | str) -> nn.Module | None:
        """Returns the uninitialised 4D module that replaces the unit; None for a table."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        options = {
            "grid": grid, "layout": "replicated", "seed": None, "dtype": weight.dtype,
            "device": device,
        }  # fmt: skip
        if kind in ("norm", "head_norm"):
            size, _ = self.features
            norm: type[LayerNorm | RMSNorm]
            norm = HeadNorm if kind == "head_norm" else RMSNorm
            if is_layer_norm(self.module):
                norm = LayerNorm
                options["bias"] = getattr(self.module, "bias", None) is not None
            return norm(size, eps=norm_eps(self.module, weight.dtype), **options)  # type: ignore[arg-type]
        first, second = self.features
        if kind == "embedding":
            return Embedding(first, second, **options)  # type: ignore[arg-type]
        if kind == "table":
            grid.local_block((first, second), {1: ("y",)})
            return None
        has_bias = getattr(self.module, "bias", None) is not None
        return Linear(first, second, role=kind, bias=has_bias, **options)  # type: ignore[arg-type]


def is_inside(name: str, other: str) -> bool:
    """Whether the module of this name is the other one, or inside it."""
    return not other or name == other or name.startswith(f"{other}.")


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, a Linear whose weight is [K, N]."""
    return type(module).__name__ == "Conv1D"


def is_layer_norm(module: nn.Module) -> bool:
    """Whether the module has the name of a LayerNorm; `_computes_norm` checks what it computes."""
    return type(module).__name__.endswith("LayerNorm")


def norm_eps(module: nn.Module, dtype: torch.dtype) -> float:
    """Returns the number that a norm adds to the variance: its attribute with "eps" in the name.

    Classes name it eps, epsilon, variance_epsilon and so on; `_computes_norm` checks it.
    """
    for name, value in vars(module).items():
        if "eps" in name and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    # torch's RMSNorm without a given eps; LayerNorms that state none use torch's.
    return 1e-5 if is_layer_norm(module) else torch.finfo(dtype).eps


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def find_units(
    model: nn.Module, grid: Grid, asked: Mapping[str, str], plain: Mapping[str, str]
) -> dict[str, Unit]:
    """Returns the units by name, in the order of the tree. They cover all parameters.

    asked: kinds by module name, from the caller's plan. plain: modules that are known to stay
    plain, with the reasons.
    """
    units: dict[str, Unit] = {}
    plain = {n: "the plan says so" for n, kind in asked.items() if kind == "plain"} | dict(plain)
    _descend(model, "", grid, asked, plain, {}, units)
    _mark_tied(units)
    _choose_tables(units)
    for name, kind in asked.items():
        if kind not in ("plain", "local_heads"):
            _use_asked(name, kind, units)
    return units


def _use_asked(name: str, kind: str, units: Mapping[str, Unit]) -> None:
    """Gives a unit the kind of the caller's plan. Raises ValueError if that is impossible."""
    kinds = _KINDS_OF[units[name].family] if name in units else ("plain", "local_heads")
    if name in units and units[name].is_head:
        kinds = (units[name].family if units[name].family != "linear" else "expand", "plain")
    if kind not in kinds:
        what = f"{units[name].what}. {units[name].reason}" if name in units else "a part of another"
        raise ValueError(
            f"parallelize: plan[{name!r}] must be one of {', '.join(kinds)}, got {kind!r}: it is "
            f"{what}".rstrip(". ")
        )
    units[name].asked = kind
    if kind in ("table", "embedding"):
        units[name].family = kind


def _descend(
    module: nn.Module,
    name: str,
    grid: Grid,
    asked: Mapping[str, str],
    plain: Mapping[str, str],
    parents: Mapping[str, nn.Module],
    units: dict[str, Unit],
) -> None:
    if any(unit.module is module for unit in units.values()):
        return  # the same object in a second place
    own = own_parameters(module)
    if not any(True for _ in module.parameters()):
        return
    reason = plain.get(name, "")
    if not reason and asked.get(name) != "local_heads":
        reason = why_not_split(module, grid.size("x"))
    has_modules = any(any(True for _ in child.parameters()) for child in module.children())
    if not reason and has_modules:
        inside = {id(p) for child in module.modules() if child is not module
                  for p in child._parameters.values()}  # fmt: skip
        alone = [key for key, p in own.items() if id(p) not in inside]
        if alone:
            reason = f"it has its own parameter ({alone[0]}) next to modules with parameters"
    if reason:
        units[name] = Unit(name, module, "plain", type(module).__name__, reason)
        return
    if not has_modules:
        units[name] = unit = _leaf(name, module, own)
        unit.parents = dict(parents)
        if unit.family == "norm" and _is_of_heads(unit):
            unit.family, unit.features = "head_norm", (unit.features[0], 0)
        return
    if known(module) is not None:
        parents = {**parents, name: module}
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        _descend(child, full_name, grid, asked, plain, parents, units)


def _leaf(name: str, module: nn.Module, own: Mapping[str, nn.Parameter]) -> Unit:
    """Returns the unit of a module without submodules."""
    family, reason = _family(module, own)
    kind, shape = type(module).__name__, tuple(next(iter(own.values())).shape)
    what = f"{kind} {' x '.join(str(size) for size in shape)}"
    unit = Unit(name, module, family, what, reason)
    if family == "norm":
        unit.features = (shape[0], shape[0])
    elif family != "plain":
        unit.features = (shape[0], shape[1])
    if family == "linear":
        if not is_transposed(module):
            unit.features = (shape[1], shape[0])
        unit.what = f"{kind} {unit.features[0]} -> {unit.features[1]}"
    return unit


def _is_of_heads(unit: Unit) -> bool:
    """Whether the unit is a known attention's RMSNorm of each head's features."""
    parent, _, own_name = unit.name.rpartition(".")
    how = known(unit.parents[parent]) if parent in unit.parents else None
    is_rms = not is_layer_norm(unit.module)
    return how is not None and own_name in how.head_norms and is_rms


def _family(module: nn.Module, own: Mapping[str, nn.Parameter]) -> tuple[str, str]:
    """Returns the family of a module by its class, and the reason if it is "plain"."""
    kind, keys = type(module).__name__, set(own)
    if keys - {"bias"} == {"weight"} and (type(module) is nn.Linear or is_transposed(module)):
        return "linear", ""
    if isinstance(module, nn.Embedding) and keys == {"weight"}:
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "plain", "it has max_norm, sparse or scale_grad_by_freq"
        return "embedding", ""
    what = "LayerNorm" if is_layer_norm(module) else "RMSNorm"
    has_parameters = keys == {"weight"} or (keys == {"weight", "bias"} and is_layer_norm(module))
    if kind.endswith(what) and has_parameters:
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
            return "plain", "it normalises several dims at once"
        if _computes_norm(module, own["weight"], own.get("bias")):
            return "norm", ""
        return "plain", f"{kind} does not compute the {what} of one tensor"
    return "plain", f"parallelize has no module in place of a {kind} with {', '.join(own)}"


@torch.no_grad()
def _computes_norm(module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> bool:
    """Whether the module computes the norm of its name.

    Gemma's does not compute x / sqrt(mean(x^2) + eps) * weight.
    """
    if weight.dim() != 1 or weight.is_meta:
        return False
    size = weight.shape[0]
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    for scale in (1, 1e-3):  # for small numbers eps matters, too
        x = scale * torch.linspace(-1, 2, 2 * size, device=weight.device).view(2, size)
        x = x.to(weight.dtype)
        eps = norm_eps(module, weight.dtype)
        if is_layer_norm(module):
            want = F.layer_norm(x, (size,), weight, bias, eps)
        else:
            want = F.rms_norm(x, (size,), weight, eps)
        try:
            error = (module(x) - want).norm()
        except Exception:  # third-party code may need other arguments
            return False
        if not error <= tolerance * want.norm() + 1e-30:
            return False
    return True


def _mark_tied(units: Mapping[str, Unit]) -> None:
    """Marks heads that share an embedding's table; other units that share parameters stay plain."""
    holders: dict[int, list[Unit]] = {}
    for unit in units.values():
        for parameter in {id(p) for p in unit.module.parameters()}:
            holders.setdefault(parameter, []).append(unit)
    for sharing in (found for found in holders.values() if len(found) > 1):
        families = sorted(unit.family for unit in sharing)
        is_tied_head = families == ["embedding", "linear"] and all(
            type(unit.module) in (nn.Embedding, nn.Linear) for unit in sharing
        )
        for unit in sharing:
            others = ", ".join(other.name for other in sharing if other is not unit)
            if is_tied_head:
                unit.is_head = True
            elif unit.family != "plain":
                unit.family = "plain"
                unit.reason = f"it shares a parameter with {others}"


def _choose_tables(units: Mapping[str, Unit]) -> None:
    """Keeps one embedding to split over its vocabulary: the tied one, else the largest."""
    found = [unit for unit in units.values() if unit.family == "embedding"]
    tied = [unit for unit in found if unit.is_head]
    exact = [unit for unit in found if type(unit.module) is nn.Embedding]
    chosen = tied or sorted(exact, key=lambda unit: -unit.features[0])[:1]
    for unit in found:
        if unit not in chosen:
            unit.family = "table"
