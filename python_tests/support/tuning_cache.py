"""A test's own folder of measurements, and its content."""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axonn_ext.kernels import extension, tuning
from axonn_ext.spec import settings


@contextlib.contextmanager
def cache_in(directory: Path | str, **changes: Any) -> Iterator[None]:
    """Makes this rank keep its measurements in the folder, and forget those in memory."""
    loaded = settings.load()
    tuning.clear()
    extension.configure(dataclasses.replace(loaded, cache_dir=str(directory), **changes))
    try:
        yield
    finally:
        extension.configure(loaded)
        tuning.clear()


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def edit(file: Path, algorithm: str) -> None:
    """Edits a file of measurements so that `algorithm` was the fastest."""
    record = tomllib.loads(file.read_text())
    text = file.read_text().replace(f'"{record["algorithm"]}"', f'"{algorithm}"')
    file.write_text(text)
    assert tomllib.loads(text)["algorithm"] == algorithm
