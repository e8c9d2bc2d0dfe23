"""Buckets: concatenated elements of many parameters that are sent or updated together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from axonn_ext.spec.buckets import Cut, cuts_of, whole_cuts


@dataclass(frozen=True)
class Run:
    """Elements of a parameter's block, in row-major order, and their place in a bucket or a part.

    at: the place of the first element
    """

    parameter: nn.Parameter
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Returns these elements of a tensor with the parameter's shape; a view if possible."""
        return tensor.detach().reshape(-1)[self.start : self.stop]

    def inside(self, flat: Tensor) -> Tensor:
        """Returns these elements of the bucket, or of the part."""
        return flat[self.at : self.at + self.numel]


@dataclass(frozen=True)
class Bucket:
    """Consecutive runs, each at an aligned place (spec.buckets), in parts of equal length.

    numel: including the gaps between the runs and after the last one; num_parts divides it.
    """

    runs: tuple[Run, ...]
    numel: int
    num_parts: int

    @property
    def part_numel(self) -> int:
        """The number of elements of one part."""
        return self.numel // self.num_parts

    def part(self, index: int) -> tuple[Run, ...]:
        """Returns the runs, or pieces of runs, in a part, with their places in the part."""
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
    """Yields buckets of at most `elements`, or of the fewest elements that can be divided.

    A parameter that does not fit a bucket continues in the next one.
    """
    every = list(parameters)
    sizes = [parameter.numel() for parameter in every]
    for cuts, numel in cuts_of(sizes, elements=elements, num_parts=num_parts):
        yield _bucket(every, cuts, numel, num_parts)


def whole_buckets_of(parameters: Iterable[nn.Parameter], *, num_parts: int) -> Iterator[Bucket]:
    """Yields buckets with at most one parameter in each part, and that as a whole."""
    every = list(parameters)
    sizes = [parameter.numel() for parameter in every]
    for cuts, numel in whole_cuts(sizes, num_parts=num_parts):
        yield _bucket(every, cuts, numel, num_parts)


def _bucket(
    parameters: Sequence[nn.Parameter], cuts: Iterable[Cut], numel: int, num_parts: int
) -> Bucket:
    runs = tuple(Run(parameters[c.number], c.start, c.stop, c.at) for c in cuts)
    return Bucket(runs, numel, num_parts)
