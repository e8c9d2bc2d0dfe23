"""Token files: a PREFIX.bin with tokens, and a PREFIX.idx that says where documents begin.

The format is Megatron-Core's indexed dataset; docs/data.md describes it.
Source: github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py
"""

from __future__ import annotations

import bisect
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from axonn_ext.data.chunk_ends import Shelf
from axonn_ext.data.vocabulary import TokenArray
from axonn_ext.spec.files.token_files import TokenFiles, read_description

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document indices
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_FLOATS = (6, 7)


@dataclass(frozen=True)
class _Index:
    """The memory-mapped arrays of an .idx, read only where they are used.

    lengths     for each sequence, its number of tokens
    pointers    for each sequence, the byte in the .bin where it begins
    documents   for each document, its first sequence; then the number of sequences
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]
    num_tokens: int


class IndexedTokens:
    """The tokens of token files, PREFIX.bin with its index PREFIX.idx.

    Opening reads a few hundred bytes. Tokens are read (pread) on demand, so that they never count
    as this process's memory; the index is mapped.

    Raises: ValueError, with the file's name, if a file is missing, truncated or of another format.
    """

    def __init__(self, files: TokenFiles) -> None:
        self.name, self._index_name = str(files.bin), str(files.idx)
        try:
            with files.idx.open("rb") as index, files.bin.open("rb") as tokens:
                self._index = _read_index(files, index, os.fstat(tokens.fileno()).st_size)
                self._descriptor = os.dup(tokens.fileno())
                about_index = os.fstat(index.fileno())
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
        self.shelf = Shelf(
            files.idx.with_suffix(".orders"), f"{about_index.st_size} {about_index.st_mtime_ns}"
        )
        self.num_tokens = self._index.num_tokens
        self._num_bytes = self.num_tokens * self._index.dtype.itemsize
        about = read_description(files)
        if about is not None and about.tokens != self.num_tokens:
            raise ValueError(
                f"{files.json} describes {about.tokens:,} tokens, but {files.bin} has "
                f"{self.num_tokens:,}"
            )
        self.num_documents = len(self._index.documents) - 1

    def __del__(self) -> None:
        descriptor = self.__dict__.pop("_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def read(self, start: int, count: int) -> TokenArray:
        size = self._index.dtype.itemsize
        self._check_sequences(start * size, (start + count) * size)
        parts, offset, end = [], start * size, (start + count) * size
        while offset < end:  # each call returns at most 2 GB
            try:
                part = os.pread(self._descriptor, end - offset, offset)
            except OSError as error:
                raise ValueError(f"cannot read {self.name}: {error.strerror}") from None
            if not part:
                raise ValueError(f"{self.name} has become shorter: byte {offset:,} is missing")
            parts.append(part)
            offset += len(part)
        return np.frombuffer(b"".join(parts), dtype=self._index.dtype)

    def starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self._index
        sequences = index.documents[documents]
        outside = (sequences < 0) | (sequences > len(index.pointers))
        if outside.any():
            worst = int(np.argmax(outside))
            raise ValueError(
                f"{self._index_name} is damaged: document {int(documents[worst]):,} begins with "
                f"sequence {int(sequences[worst]):,} of {len(index.pointers):,}"
            )
        after = index.documents[np.minimum(documents + 1, self.num_documents)]
        if (wrong := after < sequences).any():
            worst = int(np.argmax(wrong))
            raise ValueError(
                f"{self._index_name} is damaged: document {int(documents[worst]):,} begins with "
                f"sequence {int(sequences[worst]):,}, and the one after it with "
                f"{int(after[worst]):,}"
            )
        inside = sequences < len(index.pointers)
        starts = np.full(len(sequences), self.num_tokens, dtype=np.int64)
        starts[inside] = index.pointers[sequences[inside]] // index.dtype.itemsize
        return starts

    def _check_sequences(self, begin: int, end: int) -> None:
        """Raises ValueError if the sequences of these bytes do not follow each other in the .bin.

        Only sequences that are read are checked, since an index may have gigabytes.
        """
        index = self._index
        # The mapped array may be unaligned, and np.searchsorted would copy it.
        first = max(0, bisect.bisect_right(index.pointers, begin) - 1)
        last = bisect.bisect_left(index.pointers, end, lo=first)
        begins = index.pointers[first:last]
        ends = begins + index.lengths[first:last].astype(np.int64) * index.dtype.itemsize
        after = np.append(index.pointers[first + 1 : last + 1], self._num_bytes)[: len(ends)]
        wrong = ends != after
        if wrong.any() or (len(begins) and int(begins[0]) > begin):
            worst = int(np.argmax(wrong))
            raise ValueError(
                f"{self._index_name}: expected the sequences one after the other, but sequence "
                f"{first + worst:,} is at the bytes {int(begins[worst]):,} to {int(ends[worst]):,},"
                f" and what follows it at {int(after[worst]):,}"
            )


def _read_index(files: TokenFiles, stream: BinaryIO, bin_bytes: int) -> _Index:
    """Maps the index and checks it as far as possible without reading it."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(
            f"{files.idx} is not a token index: expected its first bytes to be MMIDIDX, as "
            "axonn-ext tokenize and Megatron write them"
        )
    _, version, code, num_sequences, num_entries = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        kind = "floats" if code in _FLOATS else "unknown"
        raise ValueError(
            f"{files.idx}: expected version {VERSION} and whole numbers as tokens (dtype codes "
            f"{', '.join(map(str, DTYPES))}), got version {version} and code {code}"
            + (f" ({kind})" if version == VERSION else "")
        )
    if not num_entries:
        raise ValueError(f"{files.idx}: expected at least one index of a document, got none")
    needed = HEADER.size + 12 * num_sequences + 8 * num_entries
    size = os.fstat(stream.fileno()).st_size
    if size not in (needed, needed + num_sequences):  # multimodal: one more byte per sequence
        raise ValueError(
            f"{files.idx} is not whole: expected {needed:,} bytes for {num_sequences:,} sequences "
            f"and {num_entries:,} indices of documents, got {size:,}"
        )
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    lengths = np.frombuffer(mapped, "<i4", num_sequences, HEADER.size)
    pointers = np.frombuffer(mapped, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(mapped, "<i8", num_entries, HEADER.size + 12 * num_sequences)
    dtype = np.dtype(DTYPES[code])
    expected = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if num_sequences else 0
    if bin_bytes != expected:
        raise ValueError(
            f"{files.bin} is not whole, or of another {files.idx.name}: expected {expected:,} "
            f"bytes, got {bin_bytes:,}"
        )
    if documents[0] != 0 or documents[-1] != num_sequences:
        raise ValueError(
            f"{files.idx}: expected indices of documents from 0 to {num_sequences}, the number of "
            f"sequences, got {documents[0]} and {documents[-1]}"
        )
    return _Index(dtype, lengths, pointers, documents, expected // dtype.itemsize)
