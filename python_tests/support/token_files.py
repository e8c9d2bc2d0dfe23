"""Writes and reads token files from the description of their format, without axonn_ext."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
Documents = Sequence[Sequence[Sequence[int]]]  # each document has sequences of tokens


def write_token_files(
    prefix: Path, documents: Documents, dtype: str = "int32", *, modes: bool = False
) -> None:
    """Writes PREFIX.bin and PREFIX.idx as Megatron's builder does.

    modes: also write a mode byte for each sequence.
    """
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    tokens = b"".join(np.array(sequence, dtype=dtype).tobytes() for sequence in sequences)
    Path(f"{prefix}.bin").write_bytes(tokens)
    pointers, ends = [], [0]
    for index in range(len(sequences)):
        pointers.append(sum(len(sequence) for sequence in sequences[:index]) * size)
    for document in documents:
        ends.append(ends[-1] + len(document))
    with Path(f"{prefix}.idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00")
        stream.write(struct.pack("<Q", 1))
        stream.write(struct.pack("<B", CODES[dtype]))
        stream.write(struct.pack("<Q", len(sequences)))
        stream.write(struct.pack("<Q", len(ends)))
        stream.write(struct.pack(f"<{len(sequences)}i", *(len(s) for s in sequences)))
        stream.write(struct.pack(f"<{len(pointers)}q", *pointers))
        stream.write(struct.pack(f"<{len(ends)}q", *ends))
        if modes:
            stream.write(bytes(len(sequences)))


def read_token_files(prefix: Path) -> list[list[int]]:
    """The tokens of each document."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, num_sequences, num_ends = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    [dtype] = [np.dtype(name) for name, number in CODES.items() if number == code]
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    ends = struct.unpack_from(f"<{num_ends}q", index, 34 + 12 * num_sequences)
    assert len(index) == 34 + 12 * num_sequences + 8 * num_ends
    sequences = [
        np.frombuffer(tokens, dtype, length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    assert sum(lengths) * dtype.itemsize == len(tokens)
    return [[token for part in sequences[a:b] for token in part] for a, b in pairwise(ends)]
