"""Goldfish loss leaves out about one target in k, always the same ones of a text.

So no passage of a text is ever learned as a whole, however often it is seen: a model that repeats
it has to guess at each target that was left out.
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
    """Returns where targets stay, as bools: all tokens of a row but the first are targets.

        tokens  [.., S + 1]   documents  [.., S + 1]   mask  [.., S]

    mask[.., i] is about tokens[.., i + 1]. This is to look at what is left out; training needs only
    `goldfish_labels`, whose arguments and errors these are. Tokens must be >= 0. Raises ValueError
    for k below 2, h below 1 and another window, too.
    """
    labels = goldfish_labels(tokens, Goldfish(k, h, window), documents=documents)
    return labels != IGNORE_INDEX
