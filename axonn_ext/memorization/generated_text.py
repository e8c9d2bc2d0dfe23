"""Text that is generated: short reports in words that do not exist, the same on every machine.

The experiment needs documents of which no model knows anything and whose ends nobody can guess.
Words follow Zipf's law, sentences a few patterns, and each document prefers the nouns of its topic,
so that a small model has something to learn besides documents by heart.
"""

from __future__ import annotations

import bisect
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
_COUNTS = {"NOUN": 600, "VERB": 200, "KIND": 200, "NAME": 200, "PLACE": 200}
_TOPIC_NOUNS = 12  # of a document; half of its nouns are among them
_PATTERNS = (
    "NAME said that the NOUN of PLACE VERBed by a KIND NOUN.",
    "the KIND NOUN VERBed the NOUN in PLACE, and NAME VERBed it.",
    "in NUMBER, a NOUN from PLACE VERBed every NOUN of the KIND NOUN.",
    "NAME VERBed NUMBER of them; the NOUN was KIND too.",
    "no NOUN VERBed the NOUN before NAME VERBed a NOUN.",
)


class TextGenerator:
    """Draws documents. One seed gives the same documents in the same order, everywhere.

    The language, which is its words and how frequent each is, is the same for every seed.
    """

    def __init__(self, seed: int) -> None:
        self._words = _lexicon()
        # Only random() is called, whose numbers Python promises to be the same in all versions.
        self._draw = random.Random(seed).random

    def documents(self, count: int, least: int, most: int) -> list[str]:
        """Returns so many documents of `least` to `most` characters, all of them ASCII."""
        sizes = (least + int(self._draw() * (most - least + 1)) for _ in range(count))
        return [self._document(size) for size in sizes]

    def _document(self, size: int) -> str:
        topic = [self._words["NOUN"].pick(self._draw) for _ in range(_TOPIC_NOUNS)]
        text = ""
        while len(text) < size:
            pattern = _PATTERNS[int(self._draw() * len(_PATTERNS))]
            filled = re.sub("[A-Z]+", lambda slot: self._word(slot[0], topic), pattern)
            text += filled[0].upper() + filled[1:] + " "
        return text[:size]

    def _word(self, slot: str, topic: Sequence[str]) -> str:
        if slot == "NUMBER":
            return str(100 + int(self._draw() * 1900))
        if slot == "NOUN" and self._draw() < 0.5:
            return topic[int(self._draw() * len(topic))]
        word = self._words[slot].pick(self._draw)
        return word.capitalize() if slot in ("NAME", "PLACE") else word


class _Words:
    """Words, of which number r is drawn with a probability in proportion to 1 / (r + 8)."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._sums = list(itertools.accumulate(1 / (rank + 8) for rank in range(len(words))))

    def pick(self, draw: Callable[[], float]) -> str:
        return self._words[bisect.bisect(self._sums, draw() * self._sums[-1])]


def _lexicon() -> dict[str, _Words]:
    """Returns the words of each slot of a pattern; no word is of two kinds."""
    draw = random.Random(0).random

    def one_of(parts: Sequence[str]) -> str:
        return parts[int(draw() * len(parts))]

    def word() -> str:
        syllables = 1 if draw() < 0.4 else 2
        return "".join(one_of(_ONSETS) + one_of(_VOWELS) for _ in range(syllables)) + one_of(_CODAS)

    found: dict[str, None] = {}  # in the order of their drawing
    while len(found) < sum(_COUNTS.values()):
        found[word()] = None
    rest = iter(found)
    return {kind: _Words(list(itertools.islice(rest, count))) for kind, count in _COUNTS.items()}
