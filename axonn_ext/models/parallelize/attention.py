"""Known attention classes, and how to run them on a part of the heads.

With its projections split over x, such a module gets the queries, keys and values of only its
rank's heads. Most of its code infers the number of heads from the features; explicit numbers must
be changed. Classes are recognised by name, so that transformers is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class KnownAttention:
    """How to run an attention class on local heads.

    heads       the attribute with the number of (key-value) heads, which x must divide; or the
                child whose number of features is this number times that of a head
    head_dim    the attribute with the number of features per head
    divided     attributes to divide by the number of x ranks
    fused       a child whose output is all queries, then all keys, then all values
    head_norms  the children that normalise the features of each head, [..., heads, D]
    """

    heads: str
    head_dim: str
    divided: tuple[str, ...] = ()
    fused: str = ""
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
        "GPT2Attention": KnownAttention(
            "num_heads", "head_dim", ("num_heads", "split_size"), "c_attn"
        ),
        "BertSelfAttention": _BERT,
        "RobertaSelfAttention": _BERT,
    }
)
_HEAD_ATTRIBUTES = (
    "num_heads", "n_head", "n_heads", "nhead", "num_attention_heads", "num_key_value_heads",
    "head_dim", "attention_head_size",
)  # fmt: skip


def known(module: nn.Module) -> KnownAttention | None:
    return KNOWN.get(type(module).__name__)


def why_not_split(module: nn.Module, num_x: int) -> str:
    """Returns why x cannot split this module's heads; empty if it can or if there are none."""
    if num_x == 1:
        return ""
    name, how = type(module).__name__, known(module)
    if how is None:
        found = [a for a in _HEAD_ATTRIBUTES if isinstance(getattr(module, a, None), int)]
        if not found or not any(_is_projection(child) for child in module.children()):
            return ""
        return (
            f"{name} has heads ({found[0]}={getattr(module, found[0])}), and it is not known how "
            f"it works on a part of them; known are {', '.join(KNOWN)}"
        )
    if getattr(module, "is_cross_attention", False):
        return f"{name} is a cross-attention"
    heads = num_heads(module, how)
    if heads % num_x:
        return f"{name}: its {heads} (key-value) heads must be divisible by x={num_x}"
    return ""


def num_heads(module: nn.Module, how: KnownAttention) -> int:
    """Returns the number of heads that can be split: the key-value heads, if there are fewer."""
    found = getattr(module, how.heads)
    if isinstance(found, int):
        return found
    head_dim = getattr(module, how.head_dim)
    assert isinstance(head_dim, int)
    return int(found.weight.shape[0]) // head_dim


def fused_order(rows: int, num_x: int) -> Tensor:
    """Returns the index of each row of a fused projection in the concatenated rows of q, k and v.

    The fused rows are [q, k, v] of the first x rank's heads, then of the second's, and so on.
    """
    return torch.arange(rows).view(3, num_x, -1).transpose(0, 1).flatten()


def use_local_heads(module: nn.Module, how: KnownAttention, num_x: int) -> None:
    """Divides the numbers of heads that the module's code uses."""
    for attribute in how.divided:
        setattr(module, attribute, getattr(module, attribute) // num_x)


def _is_projection(child: nn.Module) -> bool:
    return isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
