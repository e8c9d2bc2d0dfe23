"""The options of Goldfish loss."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.files.keys import check, key

WINDOWS = ("before", "target")


@dataclass(frozen=True)
class Goldfish:
    """Which targets the loss leaves out, so that no text is learned word for word.

    Raises ValueError, which names the option, for an illegal value.

    Source: Hans et al., arXiv:2406.10209, section 3.1; docs/memorization.md has the hash.
    """

    k: int = key(4, "Goldfish loss leaves out about one target in this many", minimum=2)
    h: int = key(13, "number of tokens whose hash decides if a target is left out", minimum=1)
    window: str = key(
        "before", "whether the hashed tokens end just before the target, or with it (target)",
        choices=WINDOWS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self, "goldfish.")
