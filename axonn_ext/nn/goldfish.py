"""The labels that Goldfish loss leaves; CrossEntropy skips the others, as it does any -100."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.spec.goldfish import Goldfish


def goldfish_labels(
    tokens: Tensor, goldfish: Goldfish, *, documents: Tensor | None = None
) -> Tensor:
    """Returns the next token of each token but the last, or -100 where Goldfish loss drops it.

        tokens  [.., S + 1]   documents  [.., S + 1]   labels  [.., S], int64

    Whether a target is dropped depends on its window of h tokens alone: the same in every batch, on
    every grid and device. Windows lie in one row and one document: the first h tokens of either are
    kept. tokens are int64 or int32.

    documents: a number for each token, which changes where another document begins; None: a row is
    one document.

    Collectives: none. No mask is stored, and on GPUs the host does not wait. Raises ValueError or
    TypeError for tensors that do not fit, with the argument's name.

    Source: Hans et al., arXiv:2406.10209, section 3.1; docs/memorization.md has the hash.
    """
    check_tensor("goldfish_labels", "tokens", tokens)
    if documents is not None:
        check_tensor("goldfish_labels", "documents", documents, tokens.device)
    if not isinstance(goldfish, Goldfish):
        raise TypeError(
            f"goldfish_labels: goldfish must be a Goldfish, got {type(goldfish).__name__}"
        )
    labels: Tensor = torch.ops.axonn.goldfish_labels(
        tokens, documents, goldfish.k, goldfish.h, goldfish.window == "target", IGNORE_INDEX
    )
    return labels
