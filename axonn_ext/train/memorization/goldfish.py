"""Goldfish loss leaves out about one target in k, always the same ones in a text.

So no passage is ever learned as a whole, however often it is seen: a model that repeats it has to
guess each target that was left out.
"""

from __future__ import annotations

from torch import Tensor

from axonn_ext.nn.goldfish import goldfish_labels
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.spec.goldfish import Goldfish

__all__ = ["Goldfish", "goldfish_labels", "goldfish_mask"]


def goldfish_mask(
    tokens: Tensor, *, k: int = 4, h: int = 13, window: str = "before",
    documents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns which targets are kept, as bools; all tokens of a row but the first are targets.

        tokens  [.., S + 1]   documents  [.., S + 1]   mask  [.., S]

    mask[.., i] refers to tokens[.., i + 1]. This function is for inspection; training needs only
    `goldfish_labels`, which has the same arguments and errors. Tokens must be >= 0. Raises
    ValueError also for k below 2, h below 1 and an unknown window.
    """
    labels = goldfish_labels(tokens, Goldfish(k, h, window), documents=documents)
    return labels != IGNORE_INDEX
