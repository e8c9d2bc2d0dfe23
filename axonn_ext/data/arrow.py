"""Folders that `save_to_disk` of Hugging Face's `datasets` wrote, with tokens in a column."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axonn_ext.data.chunk_ends import Shelf
from axonn_ext.data.vocabulary import TokenArray
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATE = "state.json"  # lists the files of the folder
COLUMN = "input_ids"


class ArrowTokens:
    """The tokens of the column `input_ids`, in which each row is a document.

    The files are mapped through pyarrow; opening reads the metadata of each record batch and keeps
    a few numbers per record batch in memory.

    Raises: ValueError, with the file's name, for a folder without such a column or with missing
        files, and if pyarrow is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        files = _files(folder)
        chunks = [chunk for file in files for chunk in _chunks(file)]
        written = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self.shelf = Shelf(folder / "axonn.orders", str(written))
        chunks = [(offsets, values) for offsets, values in chunks if len(offsets) > 1]
        self._offsets = [offsets for offsets, _ in chunks]
        self._values = [values for _, values in chunks]
        rows = [len(offsets) - 1 for offsets in self._offsets]
        tokens = [int(offsets[-1]) - int(offsets[0]) for offsets in self._offsets]
        self._first_rows = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._first_tokens = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        self.num_documents = int(self._first_rows[-1])
        self.num_tokens = int(self._first_tokens[-1])

    def read(self, start: int, count: int) -> TokenArray:
        pieces: list[TokenArray] = []
        chunk = int(np.searchsorted(self._first_tokens, start, side="right")) - 1
        while count > 0:
            begin = start - int(self._first_tokens[chunk]) + int(self._offsets[chunk][0])
            here = min(count, int(self._first_tokens[chunk + 1]) - start)
            if here > 0:
                pieces.append(self._values[chunk][begin : begin + here])
            start, count, chunk = start + max(here, 0), count - max(here, 0), chunk + 1
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = np.full(len(documents), self.num_tokens, dtype=np.int64)
        chunks = np.searchsorted(self._first_rows, documents, side="right") - 1
        by_chunk = np.argsort(chunks, kind="stable")
        numbers, begins = np.unique(chunks[by_chunk], return_index=True)
        for chunk, mine in zip(numbers.tolist(), np.split(by_chunk, begins[1:]), strict=False):
            if chunk == len(self._offsets):
                continue  # the end of the last document
            offsets = self._offsets[chunk]
            within = offsets[documents[mine] - self._first_rows[chunk]].astype(np.int64)
            starts[mine] = within - int(offsets[0]) + self._first_tokens[chunk]
        return starts


def is_arrow_folder(folder: Path) -> bool:
    """Whether `datasets` wrote this folder. Raises ValueError for a folder of several data sets."""
    if (folder / "dataset_dict.json").is_file():
        raise ValueError(
            f"{folder} has several data sets of `datasets`; name one of its folders, such as "
            f"{folder / 'train'}"
        )
    return (folder / STATE).is_file() and (folder / "dataset_info.json").is_file()


def _files(folder: Path) -> list[Path]:
    """Returns the files in the order of their rows. Raises ValueError."""
    try:
        state = read_json(folder / STATE)
        names = [entry["filename"] for entry in state["_data_files"]]
        indirect = bool(state.get("_indices_files"))
    except InputError:
        raise
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{folder / STATE}: expected a list _data_files of file names") from None
    if indirect or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{folder / STATE}: expected files with the rows themselves; save_to_disk of a newer "
            "version of datasets writes them"
        )
    return [folder / name for name in names]


def _chunks(file: Path) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Returns the offsets and values of each record batch of a file, without a copy."""
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"{file.parent} needs pyarrow (pip install 'axonn-ext[arrow]')") from None
    try:
        with pyarrow.memory_map(str(file)) as source:
            table = pyarrow.ipc.open_stream(source).read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    if COLUMN not in table.column_names:
        raise ValueError(
            f"{file}: expected a column {COLUMN}, got {', '.join(table.column_names) or 'none'}"
        )
    column = table.column(COLUMN)
    types = pyarrow.types
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise ValueError(f"{file}: expected lists of whole numbers in {COLUMN}, got {kind}")
    if column.null_count or any(chunk.values.null_count for chunk in column.chunks):
        raise ValueError(f"{file}: expected a list of tokens in each row of {COLUMN}, got null")
    return [
        (chunk.offsets.to_numpy(zero_copy_only=True), chunk.values.to_numpy(zero_copy_only=True))
        for chunk in column.chunks
    ]
