"""The labels that Goldfish loss keeps; the others become -100, which CrossEntropy skips."""

from __future__ import annotations

import torch
from torch import Tensor

from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.spec.goldfish import Goldfish

# The steps of SplitMix64. int64 holds the bits: its sums and products wrap around as uint64's do.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31


def goldfish_labels(
    tokens: Tensor, goldfish: Goldfish, *, documents: Tensor | None = None
) -> Tensor:
    """Returns each token's next token as its label, or -100 where Goldfish loss drops it.

        tokens  [.., S + 1]   documents  [.., S + 1]   labels  [.., S], int64

    Whether a target is dropped depends only on its window of h tokens, so it is the same in every
    batch, on every grid and device. Windows lie in one row and one document: the first h tokens of
    either are kept. tokens are int64 or int32.

    documents: a number for each token, which changes where another document begins; None: a row is
    one document.

    Collectives: none. On GPUs the host does not wait. Raises ValueError or TypeError, which names
    the argument, for tensors that do not fit.

    Source: Hans et al., arXiv:2406.10209, section 3.1; docs/memorization.md has the hash.
    """
    _check_ids("tokens", tokens)
    if tokens.dim() < 1 or tokens.size(-1) < 1:
        raise ValueError(
            f"goldfish_labels: tokens must have shape [.., S + 1], got {list(tokens.shape)}"
        )
    if documents is not None:
        _check_ids("documents", documents, tokens.device)
        if documents.shape != tokens.shape:
            raise ValueError(
                f"goldfish_labels: documents must have the shape of tokens, {list(tokens.shape)}, "
                f"got {list(documents.shape)}"
            )
    if not isinstance(goldfish, Goldfish):
        raise TypeError(
            f"goldfish_labels: goldfish must be a Goldfish, got {type(goldfish).__name__}"
        )
    tokens = tokens.long()
    labels = tokens[..., 1:].clone(memory_format=torch.contiguous_format)
    if goldfish.h < tokens.size(-1):
        labels[..., goldfish.h - 1 :].masked_fill_(
            _drops(tokens, goldfish, documents), IGNORE_INDEX
        )
    return labels


def _check_ids(argument: str, ids: Tensor, device: torch.device | None = None) -> None:
    check_tensor("goldfish_labels", argument, ids, device)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"goldfish_labels: {argument} must be int64 or int32, got {ids.dtype}")


def _drops(tokens: Tensor, goldfish: Goldfish, documents: Tensor | None) -> Tensor:
    """Returns whether the tokens h, h + 1, ... of each row are dropped as targets."""
    count = tokens.size(-1) - goldfish.h
    first = int(goldfish.window == "target")
    words, state = tokens + _GOLDEN, tokens.new_zeros([*tokens.shape[:-1], count])
    for i in range(goldfish.h):
        state += words[..., first + i : first + i + count]
        _mix_bits(state)
    # Signed numbers with the highest bit flipped have the order of unsigned ones. A 64-bit hash
    # times k is below 2^64 for one hash in k.
    found = (state ^ -(2**63)) <= (2**64 - 1) // goldfish.k - 2**63
    if documents is not None:
        same = documents[..., 1:] == documents[..., :-1]
        for i in range(goldfish.h):
            found &= same[..., i : i + count]
    return found


def _mix_bits(word: Tensor) -> None:
    """Applies the last step of SplitMix64, a bijection of 64 bits, in place."""
    for shift, factor in _MIX:
        word.bitwise_xor_(_shifted_right(word, shift)).mul_(factor)
    word.bitwise_xor_(_shifted_right(word, _LAST_SHIFT))


def _shifted_right(word: Tensor, bits: int) -> Tensor:
    mask = (1 << (64 - bits)) - 1  # removes the copies of the sign bit
    return torch.bitwise_right_shift(word, bits).bitwise_and_(mask)
