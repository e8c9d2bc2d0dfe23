"""Generates text: short reports in made-up words, the same on every machine.

The experiment needs documents that no model has seen and whose ends nobody can guess. Sentences
follow a few patterns, and all words of a kind are equally likely. So a small model soon knows the
language nearly as well as possible, whatever loss it is trained with, and yet nobody can guess
which words come next.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence

_ONSETS = (
    "b", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "br", "dr", "gr",
    "kl", "pl", "sh", "st", "th", "tr",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "", "l", "m", "n", "r", "s", "t", "nd", "rk")
_COUNTS = {"NOUN": 100, "VERB": 40, "KIND": 40, "NAME": 40, "PLACE": 40}  # words of each kind
_PATTERNS = (
    "NAME said that the NOUN of PLACE VERBed by a KIND NOUN.",
    "the KIND NOUN VERBed the NOUN in PLACE, and NAME VERBed it.",
    "in NUMBER, a NOUN from PLACE VERBed every NOUN of the KIND NOUN.",
    "NAME VERBed NUMBER of them; the NOUN was KIND too.",
    "no NOUN VERBed the NOUN before NAME VERBed a NOUN.",
)


class TextGenerator:
    """Draws documents. One seed gives the same documents in the same order, everywhere.

    The words of the language are the same for every seed.
    """

    def __init__(self, seed: int) -> None:
        self._words = _lexicon()
        # Only random() is called: Python promises the same numbers from it in all versions.
        self._draw = random.Random(seed).random

    def documents(self, count: int, least: int, most: int) -> list[str]:
        """Returns `count` documents of `least` to `most` ASCII characters."""
        sizes = (least + int(self._draw() * (most - least + 1)) for _ in range(count))
        return [self._document(size) for size in sizes]

    def _document(self, size: int) -> str:
        text = ""
        while len(text) < size:
            pattern = _one_of(_PATTERNS, self._draw)
            filled = re.sub("[A-Z]+", lambda slot: self._word(slot[0]), pattern)
            text += filled[0].upper() + filled[1:] + " "
        return text[:size]

    def _word(self, slot: str) -> str:
        if slot == "NUMBER":
            return str(100 + int(self._draw() * 1900))
        word = _one_of(self._words[slot], self._draw)
        return word.capitalize() if slot in ("NAME", "PLACE") else word


def _one_of(parts: Sequence[str], draw: Callable[[], float]) -> str:
    return parts[int(draw() * len(parts))]


def _lexicon() -> dict[str, list[str]]:
    """Returns the words for each slot of a pattern; no word has two kinds."""
    draw = random.Random(0).random

    def word() -> str:
        syllables = 1 if draw() < 0.4 else 2
        parts = [_one_of(each, draw) for _ in range(syllables) for each in (_ONSETS, _VOWELS)]
        return "".join(parts) + _one_of(_CODAS, draw)

    found: dict[str, None] = {}  # in the order drawn
    while len(found) < sum(_COUNTS.values()):
        found[word()] = None
    rest = iter(found)
    return {kind: list(itertools.islice(rest, count)) for kind, count in _COUNTS.items()}
