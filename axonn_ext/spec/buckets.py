"""How the elements of many parameters are cut into buckets, which the data ranks divide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# A parameter is only cut at multiples of this many elements. The vectors of torch's AdamW for CPUs
# then fall on the same elements as in the whole parameter. (The elements after the last whole
# vector are rounded differently, and must stay the same ones.)
ALIGNMENT = 64


class Cut(NamedTuple):
    """Elements of one parameter, in row-major order, and their position in a bucket.

    number: the number of the parameter. at: the position of the first element.
    """

    number: int
    start: int
    stop: int
    at: int


def aligned(numel: int) -> int:
    """Returns the elements that `numel` elements take in a bucket, with the gap after them."""
    return _rounded_up(numel, ALIGNMENT)


def cuts_of(
    sizes: Iterable[int], *, elements: int, num_parts: int
) -> Iterator[tuple[tuple[Cut, ...], int]]:
    """Yields the cuts of each bucket, and the elements of the bucket, which num_parts divides.

    sizes: the elements of each parameter. elements: the most in a bucket, unless that is too few to
    divide. A parameter that does not fit into a bucket continues in the next one.
    """
    room = _room(elements, num_parts)
    cuts: list[Cut] = []
    at = 0
    for number, numel in enumerate(sizes):
        start = 0
        while start < numel:
            if at == room:
                yield tuple(cuts), room
                cuts, at = [], 0
            stop = min(numel, start + room - at)
            cuts.append(Cut(number, start, stop, at))
            at += aligned(stop - start)
            start = stop
    if cuts:
        yield tuple(cuts), _rounded_up(at, ALIGNMENT * num_parts)


def whole_cuts(sizes: Sequence[int], *, num_parts: int) -> Iterator[tuple[tuple[Cut, ...], int]]:
    """Yields buckets with at most one whole parameter in each part; see `cuts_of`.

    Parameters of one size fill buckets of their own; those that are left share buckets, the largest
    first.
    """
    alike: dict[int, list[int]] = {}
    left: list[int] = []
    for number, numel in enumerate(sizes):
        group = alike.setdefault(numel, [])
        group.append(number)
        if len(group) == num_parts:
            yield _one_each(group, sizes, num_parts)
            group.clear()
    for numel in sorted(alike, reverse=True):
        left += alike[numel]
    for first in range(0, len(left), num_parts):
        yield _one_each(left[first : first + num_parts], sizes, num_parts)


def _one_each(
    numbers: Sequence[int], sizes: Sequence[int], num_parts: int
) -> tuple[tuple[Cut, ...], int]:
    part = aligned(max(sizes[number] for number in numbers))
    cuts = (Cut(number, 0, sizes[number], i * part) for i, number in enumerate(numbers))
    return tuple(cuts), part * num_parts


class BucketSizes(NamedTuple):
    """The elements of the buckets from `cuts_of`: `num_full` of size `full`, then one of `last`.

    last: 0 if there is none.
    """

    num_full: int
    full: int
    last: int

    @property
    def total(self) -> int:
        """The number of elements in all buckets."""
        return self.num_full * self.full + self.last

    @property
    def largest(self) -> int:
        """The number of elements in the largest bucket; 0 if there is none."""
        return self.full if self.num_full else self.last

    def each(self) -> Iterator[int]:
        """Yields the elements of each bucket."""
        yield from (self.full,) * self.num_full
        if self.last:
            yield self.last


def bucket_sizes(aligned_elements: int, *, elements: int, num_parts: int) -> BucketSizes:
    """Returns the sizes of the buckets of parameters with this many elements, including gaps.

    aligned_elements: the sum of `aligned` of each parameter; the order does not matter.
    """
    room = _room(elements, num_parts)
    num_full, left = divmod(aligned_elements, room)
    return BucketSizes(num_full, room, _rounded_up(left, ALIGNMENT * num_parts))


def _room(elements: int, num_parts: int) -> int:
    unit = ALIGNMENT * num_parts
    return max(unit, elements // unit * unit)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
