"""Buckets: the elements of many parameters in a row, which cross or are updated together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

# Wherever a parameter is cut, it is at a multiple of so many of its elements. The vectors of
# torch's AdamW for CPUs then fall on the same elements as in the whole parameter. (The elements
# behind the last whole vector are rounded otherwise, and must stay the same ones.)
ALIGNMENT = 64


@dataclass(frozen=True)
class Run:
    """Elements of a parameter's block, in row-major order, and their place in a bucket or a part.

    at: the place of the first of them
    """

    parameter: nn.Parameter
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Returns these elements of a tensor that has the parameter's shape: a view, if it can."""
        return tensor.detach().reshape(-1)[self.start : self.stop]

    def inside(self, flat: Tensor) -> Tensor:
        """Returns these elements of the bucket, or of the part."""
        return flat[self.at : self.at + self.numel]


@dataclass(frozen=True)
class Bucket:
    """Runs one after the other, each at a multiple of ALIGNMENT, in parts of equal length.

    numel: with what lies between the runs and behind the last one; num_parts divides it.
    """

    runs: tuple[Run, ...]
    numel: int
    num_parts: int

    @property
    def part_numel(self) -> int:
        """The elements of one part."""
        return self.numel // self.num_parts

    def part(self, index: int) -> tuple[Run, ...]:
        """Returns the runs of a part, or what of them lies in it, with their places in the part."""
        first, last = index * self.part_numel, (index + 1) * self.part_numel
        found = []
        for run in self.runs:
            begin, end = max(first, run.at), min(last, run.at + run.numel)
            if begin < end:
                start = run.start + begin - run.at
                found.append(Run(run.parameter, start, start + end - begin, begin - first))
        return tuple(found)


def buckets_of(
    parameters: Iterable[nn.Parameter], *, elements: int, num_parts: int = 1
) -> Iterator[Bucket]:
    """Yields buckets of at most so many elements, or of the fewest that can be parted.

    A parameter that does not fit a bucket goes on in the next one.
    """
    unit = ALIGNMENT * num_parts
    room = max(unit, elements // unit * unit)
    runs: list[Run] = []
    at = 0
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            if at == room:
                yield _bucket(runs, at, num_parts)
                runs, at = [], 0
            stop = min(parameter.numel(), start + room - at)
            runs.append(Run(parameter, start, stop, at))
            at += _rounded_up(stop - start, ALIGNMENT)
            start = stop
    if runs:
        yield _bucket(runs, at, num_parts)


def _bucket(runs: Sequence[Run], numel: int, num_parts: int) -> Bucket:
    return Bucket(tuple(runs), _rounded_up(numel, ALIGNMENT * num_parts), num_parts)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
