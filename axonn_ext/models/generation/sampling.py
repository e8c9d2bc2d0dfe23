"""Chooses the next token from its logits, the same on every rank and every grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from axonn_ext.spec.files.keys import check, key

NOT_FINITE = -1  # returned in place of a token if logits are not finite


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    As in Hugging Face's generate, top_k comes before top_p. Raises ValueError for other values.
    """

    temperature: float = key(0.0, "divisor of the logits; 0: take the most likely token", minimum=0)
    top_k: int = key(0, "number of most likely tokens to sample from; 0: all", minimum=0)
    top_p: float = key(
        1.0, "total probability of the most likely tokens to sample from; 1: all",
        above=0, maximum=1,
    )  # fmt: skip
    # The random numbers also depend on the sequence and the token's index.
    seed: int = key(0, "random seed for the choices", minimum=0, maximum=2**64 - 1)

    def __post_init__(self) -> None:
        check(self)


def choose(logits: Tensor, sampling: Sampling, sequences: Sequence[int], index: int) -> Tensor:
    """Returns the next token of each sequence, int64 [B], or NOT_FINITE.

    logits: [B, V]. sequences: the number of each sequence among all prompts. index: the token's
    index among the generated tokens.
    """
    top = logits.amax(-1, keepdim=True)  # NaN if any logit is
    lost = ~top.isfinite().squeeze(1)
    if sampling.temperature == 0:
        return logits.argmax(-1).masked_fill(lost, NOT_FINITE)
    wide = (logits - top).double() / sampling.temperature
    probabilities = wide.masked_fill(lost[:, None], 0).softmax(-1)
    kept, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        kept[:, sampling.top_k :] = 0
        kept /= kept.sum(-1, keepdim=True)
    # A token is left out if those before it already reach top_p; the first one never is.
    kept = kept.where(kept.cumsum(-1) - kept < sampling.top_p, 0)
    sums = kept.cumsum(-1)
    draws = torch.tensor([_uniform(sampling.seed, number, index) for number in sequences])
    wanted = draws.to(sums) * sums[:, -1]
    places = torch.searchsorted(sums, wanted[:, None], right=True)
    # Rounding may lead beyond the last token that is kept.
    last = (kept > 0).sum(-1, keepdim=True) - 1
    return tokens.gather(1, places.minimum(last)).squeeze(1).masked_fill(lost, NOT_FINITE)


def _uniform(seed: int, sequence: int, index: int) -> float:
    """Draws a number in [0, 1): Philox with the key (seed, sequence), at the counter `index`."""
    key = np.array([seed, sequence], dtype=np.uint64)
    counter = np.array([index, 0, 0, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53
