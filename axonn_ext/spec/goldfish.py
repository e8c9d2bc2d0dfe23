"""The options of Goldfish loss."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.parallel import check_choice

WINDOWS = ("before", "target")
_MOST = 2**63 - 1  # of int64


@dataclass(frozen=True)
class Goldfish:
    """Which targets the loss leaves out, so that no text is learned word for word.

    k       about one target in k is left out
    h       so many tokens decide about a target, by their hash
    window  "before": the h tokens before the target; "target": h tokens that end with the target

    Raises ValueError, which names the option, for k below 2, h below 1 and another window.

    Source: Hans et al., arXiv:2406.10209, section 3.1; docs/memorization.md has the hash.
    """

    k: int = 4
    h: int = 13
    window: str = "before"

    def __post_init__(self) -> None:
        for name, value, least in (("k", self.k, 2), ("h", self.h, 1)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not least <= value <= _MOST:
                raise ValueError(
                    f"goldfish.{name}: expected a whole number >= {least}, got {value!r}"
                )
        check_choice("goldfish.window", self.window, WINDOWS)
