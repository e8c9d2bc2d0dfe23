"""The rows added to a vocabulary so that a grid divides it."""

from __future__ import annotations

from axonn_ext.spec.grid import GridShape

_MULTIPLE = 128  # Megatron-LM's default of --make-vocab-size-divisible-by


def padded_vocab_size(vocab_size: int, grid: GridShape) -> int:
    """Returns the number of rows of the table and the head on a grid, whose x and z split them.

    It is the size of the vocabulary if x * z divides it, else the next multiple of 128 * x * z.

    Source: Megatron-LM, megatron/training/tokenizer, which pads to a multiple of 128 times the
    ranks that split the vocabulary.
    """
    parts = grid.x * grid.z
    if vocab_size % parts == 0:
        return vocab_size
    multiple = _MULTIPLE * parts
    return -(-vocab_size // multiple) * multiple
