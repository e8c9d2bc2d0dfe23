"""Known attention classes, and how to run them on a part of the heads.

With its projections split over x, such a module gets the queries, keys and values of only its
rank's heads. Most of its code infers the number of heads from the features; explicit numbers must
be changed. Classes are recognised by name, so that transformers is not needed. For other classes
that the caller's plan lets run on local heads, `ways` guesses what must change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class KnownAttention:
    """How to run an attention class on local heads.

    heads       the attribute with the number of (key-value) heads, which x must divide; or the
                child whose number of features is this number times that of a head
    head_dim    the attribute with the number of features per head
    divided     attributes to divide by the number of x ranks
    head_norms  the children that normalise the features of each head, [..., heads, D]
    """

    heads: str
    head_dim: str
    divided: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()


_LLAMA = KnownAttention("k_proj", "head_dim")
_BERT = KnownAttention("key", "attention_head_size", ("num_attention_heads", "all_head_size"))
KNOWN: Mapping[str, KnownAttention] = MappingProxyType(
    {
        "LlamaAttention": _LLAMA,
        "MistralAttention": _LLAMA,
        "Qwen2Attention": _LLAMA,
        "Qwen3Attention": KnownAttention("k_proj", "head_dim", head_norms=("q_norm", "k_norm")),
        "OPTAttention": KnownAttention("k_proj", "head_dim", ("num_heads",)),
        "GPT2Attention": KnownAttention("num_heads", "head_dim", ("num_heads", "split_size")),
        "BertSelfAttention": _BERT,
        "RobertaSelfAttention": _BERT,
    }
)
_COUNTS = (
    "num_heads", "n_head", "n_heads", "nhead", "num_attention_heads", "num_key_value_heads",
    "num_kv_heads", "n_kv_heads", "n_kv_head",
)  # fmt: skip
_HEAD_ATTRIBUTES = (*_COUNTS, "head_dim", "attention_head_size")
# Attributes that may hold the number of features of all heads.
_WIDTHS = (
    "n_embd", "n_embed", "embed_dim", "embedding_dim", "hidden_size", "hidden_dim", "d_model",
    "dim", "inner_dim", "all_head_size", "split_size", "q_dim", "kv_dim", "q_size", "kv_size",
)  # fmt: skip


@dataclass(frozen=True)
class LocalHeads:
    """How an attention runs on this rank's heads.

    divided   attributes to divide by the number of x ranks
    shown     its arguments that only its projections read, by position or name; its code reads no
              more than their shape, and is shown one with `features` features
    """

    divided: tuple[str, ...] = ()
    shown: tuple[int | str, ...] = ()
    features: int = 0


def known(module: nn.Module) -> KnownAttention | None:
    return KNOWN.get(type(module).__name__)


def why_not_split(module: nn.Module, num_x: int) -> str:
    """Returns why x cannot split this module's heads; empty if it can or if there are none."""
    if num_x == 1:
        return ""
    name, how = type(module).__name__, known(module)
    if how is None:
        if not is_unknown(module):
            return ""
        attribute, number = next(iter(_numbers(module, _HEAD_ATTRIBUTES).items()))
        return (
            f"{name} has heads ({attribute}={number}), and it is not known how "
            f"it works on a part of them; known are {', '.join(KNOWN)}"
        )
    if getattr(module, "is_cross_attention", False):
        return f"{name} is a cross-attention"
    heads = num_heads(module, how)
    if heads % num_x:
        return f"{name}: its {heads} (key-value) heads must be divisible by x={num_x}"
    return ""


def is_unknown(module: nn.Module) -> bool:
    """Whether the module is an attention, by its attributes and children, and not a known one."""
    has_projections = any(_is_projection(child) for child in module.children())
    return known(module) is None and has_projections and bool(_numbers(module, _HEAD_ATTRIBUTES))


def num_heads(module: nn.Module, how: KnownAttention) -> int:
    """Returns the number of heads that can be split: the key-value heads, if there are fewer."""
    found = getattr(module, how.heads)
    if isinstance(found, int):
        return found
    head_dim = getattr(module, how.head_dim)
    assert isinstance(head_dim, int)
    return int(found.weight.shape[0]) // head_dim


def fused_order(sections: Sequence[int], num_x: int) -> Tensor:
    """Returns the index of each row of a fused projection in the concatenated rows of q, k and v.

    sections: the numbers of rows of q, k and v. The fused rows are [q, k, v] of the first x rank's
    heads, then of the second's, and so on.
    """
    blocks = [rows.view(num_x, -1) for rows in torch.arange(sum(sections)).split([*sections])]
    return torch.cat(blocks, 1).flatten()


def ways(
    module: nn.Module, *, features: int, sizes: Collection[int], shown: Iterable[int | str],
    num_x: int,
) -> list[LocalHeads]:  # fmt: skip
    """Returns ways in which an attention may run on local heads, those with fewer changes first.

    features: of its input. sizes: the numbers of features of queries, keys and values. shown: the
    arguments that its projections read.
    """
    found = [*_numbers(module, _COUNTS)]
    found += [name for name, value in _numbers(module, _WIDTHS).items() if value in sizes]
    result = [LocalHeads()]
    if any(getattr(module, name) % num_x for name in found) or features % num_x:
        return result
    if found and num_x > 1:
        result.append(LocalHeads(tuple(found)))
    divided = tuple(found) if num_x > 1 else ()
    return [*result, LocalHeads(divided, tuple(shown), features // num_x)]


def use_local_heads(
    module: nn.Module, way: LocalHeads, projections: Iterable[nn.Module], num_x: int
) -> list[torch.utils.hooks.RemovableHandle]:
    """Changes what the module's code reads; returns the hooks that this takes.

    projections: the modules inside that read the input.
    """
    for attribute in way.divided:
        setattr(module, attribute, getattr(module, attribute) // num_x)
    if not way.shown:
        return []
    hooks = ShowFewerFeatures(way.shown, way.features)
    return [
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True),
        module.register_forward_hook(hooks.leave, always_call=True),
        *(p.register_forward_pre_hook(hooks.give, with_kwargs=True, prepend=True)
          for p in projections),
    ]  # fmt: skip


class ShowFewerFeatures:
    """Hooks that show an attention's code inputs [..., features] and give its projections the real.

    Code such as `B, T, C = x.shape` then finds the features of this rank's heads. What it is shown
    has no values; `parallelize` has made sure that only projections read it.
    """

    def __init__(self, arguments: Iterable[int | str], features: int) -> None:
        self.arguments, self.features = frozenset(arguments), features
        self._real: list[tuple[Tensor, Tensor]] = []  # what is shown, and the input itself

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._real = []
        return _mapped(self._show, args, kwargs)

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _mapped(self._give, args, kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._real = []

    def _show(self, key: int | str, value: Any) -> Any:
        if key not in self.arguments or not isinstance(value, Tensor):
            return value
        shown = value.new_full((1,), torch.nan).expand(*value.shape[:-1], self.features)
        self._real.append((shown, value))
        return shown

    def _give(self, key: int | str, value: Any) -> Any:
        return next((real for shown, real in self._real if shown is value), value)


def _mapped(
    function: Callable[[int | str, Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (
        tuple(function(place, value) for place, value in enumerate(args)),
        {name: function(name, value) for name, value in kwargs.items()},
    )


def _numbers(module: nn.Module, names: Iterable[str]) -> dict[str, int]:
    found = {name: getattr(module, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _is_projection(child: nn.Module) -> bool:
    return isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
