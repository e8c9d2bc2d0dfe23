"""Runs of a tensor's elements as blocks, described by their global position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

Offsets = tuple[int, ...]


def blocks_of_run(
    shape: Sequence[int], start: int, flat: Tensor
) -> Iterator[tuple[Offsets, Tensor]]:
    """Yields a run of a tensor's elements, in row-major order, as blocks with their offsets.

    These are views of `flat`, which has the elements from `start` on: part of a row, whole rows,
    and part of another row; a partial row of several dimensions is divided in the same way.
    """
    stop = start + flat.numel()
    if not shape or stop <= start:
        if flat.numel():
            yield (), flat.view(())
        return
    inner = math.prod(shape[1:])
    if len(shape) == 1:
        yield (start,), flat
        return
    first, last = -(-start // inner), stop // inner  # the whole rows
    if first > last:  # inside one row
        first = last = start // inner
        yield from _in_row(shape, first, start - first * inner, flat)
        return
    head = first * inner - start
    if head:
        yield from _in_row(shape, first - 1, inner - head, flat[:head])
    if first < last:
        rows = flat[head : head + (last - first) * inner]
        yield (first, *(0,) * (len(shape) - 1)), rows.view(last - first, *shape[1:])
    if stop > last * inner:
        yield from _in_row(shape, last, 0, flat[last * inner - start :])


def _in_row(
    shape: Sequence[int], row: int, start: int, flat: Tensor
) -> Iterator[tuple[Offsets, Tensor]]:
    for offsets, block in blocks_of_run(shape[1:], start, flat):
        yield (row, *offsets), block[None]
