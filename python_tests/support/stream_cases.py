"""Data sets on disk that Hugging Face's `datasets` reads as streams."""

from __future__ import annotations

import importlib.util
import json
import random
import string
from pathlib import Path

import pytest

NUM_DOCUMENTS = 330  # two blocks of a stream that is not shuffled


def needs_datasets() -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("needs datasets")


def write_lines(folder: Path, texts: list[object], *, files: int = 3, column: str = "text") -> str:
    """Writes JSON lines to several files; returns the folder's name as a stream."""
    folder.mkdir(parents=True)
    size = -(-len(texts) // files)
    for number in range(files):
        part = texts[number * size : (number + 1) * size]
        lines = [json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(part)]
        (folder / f"part-{number}.jsonl").write_text("".join(lines))
    return f"hf:{folder}"


def documents(seed: int = 0, count: int = NUM_DOCUMENTS) -> list[object]:
    """Random texts, each with its number at the beginning; every tenth is empty."""
    draw = random.Random(seed)
    return [
        "" if number % 10 == 9 else
        f"<{number}>" + "".join(draw.choices(string.ascii_lowercase, k=draw.randrange(120)))
        for number in range(count)
    ]  # fmt: skip
