"""The names of token files (docs/data.md), and the description that axonn-ext tokenize writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import FileError, is_file, parse_json, read_text
from axonn_ext.spec.files.tables import Table

FORMAT = 1  # of PREFIX.json
_MOST_BYTES = 1 << 20  # of PREFIX.json; ours have a few hundred


@dataclass(frozen=True)
class TokenFiles:
    """The files of one corpus."""

    prefix: Path

    @property
    def bin(self) -> Path:
        return self._file(".bin")

    @property
    def idx(self) -> Path:
        return self._file(".idx")

    @property
    def json(self) -> Path:
        return self._file(".json")

    def all(self) -> tuple[Path, Path, Path]:
        return self.bin, self.idx, self.json

    def _file(self, ending: str) -> Path:
        return self.prefix.with_name(self.prefix.name + ending)


@dataclass(frozen=True)
class Description:
    """The description of the tokens in PREFIX.json.

    vocabulary     "bytes", or the tokenizers file as it was named
    sha256         of that file; None for bytes
    """

    vocabulary: str
    vocabulary_size: int
    sha256: str | None
    tokens: int


def named_by(path: Path) -> TokenFiles:
    """Returns the files named by PREFIX, PREFIX.bin or PREFIX.idx."""
    return TokenFiles(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)


def find_token_files(path: Path) -> TokenFiles | None:
    """Returns the token files that `path` names, or None if it names something else.

    Raises InputError if one of the two is missing.
    """
    files = named_by(path)
    if files.prefix == path and is_file(path):
        return None
    found = [file for file in (files.bin, files.idx) if is_file(file)]
    if len(found) == 1:
        [missing] = {files.bin, files.idx} - set(found)
        raise InputError(
            f"{found[0]} is half of a corpus: {missing} does not exist (the name of a text file "
            "must not end in .bin or .idx)"
        )
    return files if found else None


def read_description(files: TokenFiles) -> Description | None:
    """Returns the contents of PREFIX.json, or None if there is none, or it is not ours.

    Raises InputError for one of ours that has another format or is incomplete.
    """
    if not is_file(files.json):
        return None
    try:
        content = parse_json(read_text(files.json, most_bytes=_MOST_BYTES), files.json)
    except FileError:
        return None  # some other file: next to a .bin any name may occur
    if not isinstance(content, dict) or "format" not in content:
        return None
    table = Table(content, "", str(files.json)).without_nulls()
    if table.count("format") != FORMAT:
        raise table.error("format", f"{FORMAT}, which this version of axonn-ext reads")
    return Description(
        vocabulary=table.text("vocabulary"),
        vocabulary_size=table.count("vocabulary_size", least=1),
        sha256=table.text("vocabulary_sha256") if table.has("vocabulary_sha256") else None,
        tokens=table.count("tokens", least=0),
    )
