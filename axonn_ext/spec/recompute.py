"""Which activations are recomputed in backward (activation checkpointing) instead of kept."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import NamedTuple

# The legal values of ParallelConfig.recompute, in words.
EXPECTED = "none, attention, every:K or every:N/K with whole numbers 1 <= N < K, or full"
_EVERY = re.compile("every:(?:([1-9][0-9]{0,5})/)?([1-9][0-9]{0,5})")


class Recomputation(NamedTuple):
    """A recomputation policy for the blocks of a rank, which are counted from 0.

    blocks, of   the first `blocks` of each `of` successive blocks are recomputed as a whole
    attention    in every block, everything between the Linears of attention is recomputed
    """

    blocks: int = 0
    of: int = 1
    attention: bool = False

    @property
    def share_of_blocks(self) -> float:
        """The share of blocks, if there are many, that are recomputed as a whole."""
        return self.blocks / self.of

    def has_block(self, position: int) -> bool:
        """Whether that block is recomputed as a whole.

        If the last block is kept, the kept activations together are the most that backward holds. A
        recomputed last block would come on top of them, and so save nothing. Therefore the first
        blocks of each group are recomputed.
        """
        return position % self.of < self.blocks

    def num_blocks(self, count: int) -> int:
        """Returns how many of the first `count` blocks are recomputed as a whole."""
        groups, rest = divmod(count, self.of)
        return groups * self.blocks + min(rest, self.blocks)

    def fewest_blocks(self, count: int) -> int:
        """Returns the minimum number of recomputed blocks among any `count` successive ones."""
        groups, rest = divmod(count, self.of)
        return groups * self.blocks + max(0, rest - (self.of - self.blocks))


_NAMED = MappingProxyType(
    {
        "none": Recomputation(),
        "attention": Recomputation(attention=True),
        "full": Recomputation(blocks=1),
    }
)


def is_policy(value: object) -> bool:
    """Whether the value names a recomputation policy."""
    return _parsed(value) is not None


def recomputation_of(policy: object) -> Recomputation:
    """Returns what the policy recomputes. Raises ValueError for a value that names none."""
    found = _parsed(policy)
    if found is None:
        raise ValueError(f"recompute must be {EXPECTED}, got {policy!r}")
    return found


def _parsed(policy: object) -> Recomputation | None:
    if not isinstance(policy, str):
        return None
    if policy in _NAMED:
        return _NAMED[policy]
    match = _EVERY.fullmatch(policy)
    if match is None:
        return None
    blocks, of = int(match[1] or 1), int(match[2])
    return Recomputation(blocks, of) if blocks < of else None
