"""Finds and reads text: a file, a folder, or the sources of the Python that runs this."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Python comes with 30 MB of sources. This part is large enough that a small model cannot memorise
# it. Text that the user names is read completely unless the user sets a limit.
DEFAULT_TEXT_BYTES = 8_000_000
_JSON_LINES = "JSON lines, in a file whose name ends in .jsonl"
_OTHER_FORMATS = {
    ".json": f"{_JSON_LINES} (Megatron's .json files only need that name)",
    **dict.fromkeys((".csv", ".tsv", ".parquet", ".arrow"), _JSON_LINES),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), "what is packed in it"),
}
_NOT_LIBRARY_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def python_sources() -> list[Path]:
    """Returns the .py files of the standard library without its tests, in a fixed order."""
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        # Not searched: site-packages may hold a hundred thousand files.
        below[:] = [name for name in below if name not in _NOT_LIBRARY_CODE]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def find_text(path: str) -> list[Path]:
    """Returns the files of the text at `path`, sorted; an empty path means Python's own sources.

    A folder is searched recursively; hidden files, whose names start with a dot, are left out.

    Raises: ValueError if the path does not exist, a folder has no files, or a file's suffix shows
        that it is not text.
    """
    if not path:
        return python_sources()
    root = expand_home(path)
    try:
        if root.is_file():
            check_format(root)
            return [root]
        if not root.is_dir():
            raise ValueError(f"expected a text file or a folder, but {path} does not exist")
        found = sorted(file for file in root.rglob("*") if file.is_file())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    files = [file for file in found if not _hidden(file, root)]
    if not files:
        raise ValueError(f"expected at least one text file, but the folder {path} holds none")
    for file in files:
        check_format(file)
    return files


def check_utf8(content: bytes, file: Path, *, first: int = 0, cut: bool = False) -> None:
    """Raises ValueError for bytes that are not UTF-8, which tokenizers files need.

    first: where the content begins in the file. cut: its last character may be incomplete.
    """
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        if cut and error.end == len(content) and error.reason == "unexpected end of data":
            return
        raise ValueError(
            f"{file} is not UTF-8 text: byte {first + error.start:,} is "
            f"{content[error.start]:#04x}; only the vocabulary bytes takes any file"
        ) from None


def expand_home(path: str) -> Path:
    """Expands ~ or ~user at the start of the path. Raises ValueError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"cannot expand {path}: {error}") from None


def read_documents(files: list[Path], max_bytes: int) -> Iterator[bytes]:
    """Yields the content of each file until `max_bytes` are read (0: no limit).

    Raises: ValueError if a file cannot be read.
    """
    left = max_bytes if max_bytes > 0 else None
    for file in files:
        try:
            with file.open("rb") as stream:
                # `read` allocates its buffer first, so never request more than the file has.
                size = os.fstat(stream.fileno()).st_size
                content = stream.read() if left is None else stream.read(min(left, size))
        except OSError as error:
            raise ValueError(f"cannot read the text file {file}: {error.strerror}") from error
        yield content
        if left is not None:
            left -= len(content)
            if left <= 0:
                return


def check_format(file: Path) -> None:
    """Raises ValueError if the file's suffix shows that it is not text."""
    expected = _OTHER_FORMATS.get(file.suffix.lower())
    if expected is not None:
        raise ValueError(f"{file} would be read as one text: expected {expected}; or rename it")


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)
