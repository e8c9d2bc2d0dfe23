"""Which ranks of a grid hold which block of a tensor, and which of them writes it.

This is arithmetic that every rank and every reader repeats, so it needs no communication.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from axonn_ext.checkpoint.runs import Offsets, blocks_of_run
from axonn_ext.spec.grid import AXES, GridShape

MOST = 1 << 62  # elements, or bytes of a file: the sum of two such numbers fits 64 bits
MOST_RANKS = 10_000_000  # file names have at most 7 digits


@dataclass(frozen=True)
class Block:
    """A block of a whole tensor, and the file that contains it."""

    offsets: Offsets
    sizes: tuple[int, ...]
    file: str

    def overlaps(self, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether it shares elements with a part of the whole tensor, and neither is empty."""
        parts = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        return all(m and n and a < b + m and b < a + n for a, n, b, m in parts)


@dataclass(frozen=True)
class Layout:
    """How the ranks of a grid hold a whole tensor.

    grid     the sizes of the axes, in the order of AXES
    shape    the shape of the whole tensor, without padding
    dims     the axes that split each dim, slowest first
    padding  rows added after the last one, so that the grid divides them; no rank writes them
    where    the coordinates, by axis, of the ranks that hold it; all along axes not in it
    runs     if the optimizer keeps a block in buckets: for each bucket, the range of the block's
             elements in it (start, stop), the position of the first in the bucket, and the number
             of elements in one data rank's part; 0: every data rank has the whole bucket
    turn     which of the ranks that hold the same block writes it, counted from the first
    """

    grid: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    padding: int = 0
    where: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    runs: tuple[tuple[int, int, int, int], ...] = ()
    turn: int = 0

    def __post_init__(self) -> None:
        whole = [*self.grid, *self.shape, self.padding, self.turn, *itertools.chain(*self.runs)]
        if not all(type(n) is int and 0 <= n <= MOST for n in whole):
            raise ValueError(f"expected whole numbers from 0 to {MOST}, got {self}")
        ranks = math.prod(self.grid)
        if len(self.grid) != len(AXES) or not 0 < ranks <= MOST_RANKS:
            raise ValueError(f"expected a grid of 1 to {MOST_RANKS} ranks, got {self.grid}")
        used = self._split
        if len(self.dims) != len(self.shape) or not set(used) <= set(AXES) - self.where.keys():
            raise ValueError(f"expected axes that split {len(self.shape)} dims, got {self}")
        if len(set(used)) != len(used) or not self.where.keys() <= set(AXES):
            raise ValueError(f"expected axes of {', '.join(AXES)}, each once, got {self}")
        for axis, places in self.where.items():
            size = self._size(axis)
            valid = all(type(place) is int and 0 <= place < size for place in places)
            if not places or not valid or len(set(places)) != len(places):
                raise ValueError(f"expected coordinates along {axis}, got {places}")
        padded = self._padded
        if math.prod(padded) > MOST or any(
            size % parts for size, parts in zip(padded, self._parts, strict=True)
        ):
            raise ValueError(f"expected a shape that the grid divides, got {self}")
        self._check_runs()

    def _check_runs(self) -> None:
        done = 0
        for start, stop, at, part in self.runs:
            room = part * self._size("data") if self._is_cut else MOST
            if start != done or stop <= start or at + stop - start > room:
                raise ValueError(f"expected runs that cover a block once, got {self.runs}")
            done = stop
        if self.runs and done != math.prod(self._sizes):
            raise ValueError(f"expected runs that cover a block once, got {self.runs}")

    @classmethod
    def whole(cls, num_ranks: int, shape: Sequence[int]) -> Layout:
        """A tensor that every rank holds in full."""
        return cls((num_ranks, 1, 1, 1, 1), tuple(shape), ((),) * len(shape))

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the grid."""
        return math.prod(self.grid)

    @property
    def num_blocks(self) -> int:
        """The number of nonempty blocks. Parts differ in it only along dim 0, the padded one."""
        places = range(self._size("data")) if self._is_cut else (0,)

        def count(row: int) -> int:
            index = [row, *[0] * len(self.shape)][: len(self.shape)]
            return sum(1 for data in places for _ in self._blocks(index, data))

        if not all(self.shape):
            return 0
        rows, *others = self._parts or (1,)
        whole = self.shape[0] // self._sizes[0] if self.shape else 1
        return math.prod(others) * (whole * count(0) + (count(whole) if whole < rows else 0))

    @property
    def _is_cut(self) -> bool:
        return any(part for *_, part in self.runs)

    @property
    def _split(self) -> list[str]:
        """The axes that split it."""
        return [axis for axes in self.dims for axis in axes] + ["data"] * self._is_cut

    @property
    def _padded(self) -> tuple[int, ...]:
        return (self.shape[0] + self.padding, *self.shape[1:]) if self.shape else ()

    @property
    def _parts(self) -> list[int]:
        return [math.prod(map(self._size, axes)) for axes in self.dims]

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sizes of a rank's block, with padding."""
        pairs = zip(self._padded, self._parts, strict=True)
        return tuple(size // parts for size, parts in pairs)

    def _size(self, axis: str) -> int:
        return self.grid[AXES.index(axis)]

    def held(self, rank: int) -> list[tuple[Offsets, tuple[int, ...]]]:
        """Returns offsets and sizes of a rank's blocks, without empty ones."""
        at = coords(self.grid, rank)
        if not self._is_placed(at):
            return []
        return list(self._held(at))

    def _held(self, at: Mapping[str, int]) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
        return self._blocks([self._number(axes, at) for axes in self.dims], at["data"])

    def _is_placed(self, at: Mapping[str, int]) -> bool:
        return all(at[axis] in places for axis, places in self.where.items())

    def owner(self, rank: int) -> int:
        """Returns which of the ranks that have the same blocks as this one writes them."""
        return self._owner(coords(self.grid, rank))

    def _owner(self, at: Mapping[str, int]) -> int:
        at, split = dict(at), self._split
        turn = self.turn + self._number(split, at)
        for axis in AXES:
            if axis not in split:
                places = self.where.get(axis, range(self._size(axis)))
                turn, place = divmod(turn, len(places))
                at[axis] = places[place]
        return _rank_at(self.grid, at)

    def path(self, rank: int) -> Iterator[tuple[str, int]]:
        """Yields the axes, in order, along which copies of the owner's blocks reach this rank.

        Each comes with the position on that axis of the rank that already has the blocks. All
        ranks on the axis yield the same at that point of their paths, also those that `where` does
        not name. Only along pipe, just the ranks that `where` names take part, and the position
        counts among them.
        """
        here, split = coords(self.grid, rank), self._split
        source = coords(self.grid, self._owner(here))
        sizes = {axis: self._size(axis) for axis in AXES if axis not in split}
        if stages := self.where.get("pipe"):
            sizes["pipe"], source["pipe"] = len(stages), stages.index(source["pipe"])
            here["pipe"] = stages.index(here["pipe"])
        axes = [axis for axis, size in sizes.items() if size > 1]
        for number, axis in enumerate(axes, 1):
            if all(here[later] == source[later] for later in axes[number:]):
                yield axis, source[axis]

    def blocks_of(self, file: str) -> Iterator[Block]:
        """Yields the blocks that a rank writes to its file."""
        rank = int(file.removeprefix("rank-").removesuffix(".safetensors"))
        at = coords(self.grid, rank)
        if self._is_placed(at) and self._owner(at) == rank:
            yield from (Block(*each, file) for each in self._held(at))

    def replicas(self) -> tuple[object, ...]:
        """Returns a key that is equal for tensors whose blocks the same ranks can write."""
        return self.grid, frozenset(self._split), tuple(sorted(self.where.items()))

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Block]:
        """Yields the blocks that share elements with a part of the whole tensor."""
        if not all(sizes):
            return
        own = self._sizes
        ranges = [
            range(offset // whole, (offset + size - 1) // whole + 1)
            for offset, size, whole in zip(offsets, sizes, own, strict=True)
        ]
        for index in itertools.product(*ranges):
            for data in self._data_of(index, offsets, sizes):
                file = file_name(self.owner(self._holder(index, data)))
                blocks = (Block(*each, file) for each in self._blocks(index, data))
                yield from (each for each in blocks if each.overlaps(offsets, sizes))

    def _number(self, axes: Sequence[str], at: Mapping[str, int]) -> int:
        """Returns the index of a part among those into which axes split a dim."""
        number = 0
        for axis in axes:
            number = number * self._size(axis) + at[axis]
        return number

    def _holder(self, index: Sequence[int], data: int) -> int:
        """Returns one of the ranks that have the block with this index along each dim."""
        at = {axis: self.where.get(axis, (0,))[0] for axis in AXES}
        if self._is_cut:
            at["data"] = data
        for axes, number in zip(self.dims, index, strict=True):
            for axis in reversed(axes):
                number, at[axis] = divmod(number, self._size(axis))
        return _rank_at(self.grid, at)

    def _blocks(self, index: Sequence[int], data: int) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
        sizes = self._sizes
        corner = [number * size for number, size in zip(index, sizes, strict=True)]
        found = [((0,) * len(sizes), sizes)] if not self.runs else self._run_blocks(sizes, data)
        for inside, own in found:
            offsets = tuple(map(sum, zip(corner, inside, strict=True)))
            if own and offsets[0] + own[0] > self.shape[0]:
                own = (max(self.shape[0] - offsets[0], 0), *own[1:])
            if all(own):
                yield offsets, own

    def _run_blocks(self, sizes: Sequence[int], data: int) -> list[tuple[Offsets, tuple[int, ...]]]:
        found = []
        for start, stop, at, part in self.runs:
            if part:
                begin = start + max(0, data * part - at)
                start, stop = begin, min(stop, start + (data + 1) * part - at)
            if start < stop:
                # Only its views' shapes matter. With a wider dtype its byte count could overflow.
                flat = torch.empty(stop - start, dtype=torch.uint8, device="meta")
                found += [(o, tuple(b.shape)) for o, b in blocks_of_run(sizes, start, flat)]
        return found

    def _data_of(
        self, index: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[int]:
        """Returns the data coordinates of the ranks whose runs may overlap a part."""
        if not self._is_cut:
            return (0,)
        first = last = 0
        for number, own, offset, size in zip(index, self._sizes, offsets, sizes, strict=True):
            inside = offset - number * own
            first = first * own + max(inside, 0)
            last = last * own + min(inside + size, own) - 1
        found: set[int] = set()
        for start, stop, at, part in self.runs:
            begin, end = max(first, start), min(last + 1, stop)
            if begin < end:
                there = at - start
                found.update(range((begin + there) // part, (end - 1 + there) // part + 1))
        return sorted(found)


def in_turn(layouts: Mapping[str, Layout], widths: Mapping[str, int]) -> dict[str, Layout]:
    """Returns the layouts with turns that spread the writing evenly over ranks with equal blocks.

    Of tensors with the same replicas, the largest has the first turn. widths: bytes per element.
    """

    def order(name: str) -> tuple[int, str]:
        layout = layouts[name]
        return -math.prod(layout._sizes) * widths[name], name

    turns: Counter[object] = Counter()
    found = {}
    for name in sorted(layouts, key=order):
        kind = layouts[name].replicas()
        found[name] = replace(layouts[name], turn=turns[kind])
        turns[kind] += 1
    return found


def file_name(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def grid_of(shape: GridShape) -> tuple[int, ...]:
    """Returns the axis sizes in the order that a layout uses."""
    return tuple(getattr(shape, axis) for axis in AXES)


def coords(grid: Sequence[int], rank: int) -> dict[str, int]:
    """Returns the coordinates of a rank."""
    at = {}
    for axis, size in zip(reversed(AXES), reversed(grid), strict=True):
        rank, at[axis] = divmod(rank, size)
    return at


def _rank_at(grid: Sequence[int], at: Mapping[str, int]) -> int:
    rank = 0
    for axis, size in zip(AXES, grid, strict=True):
        rank = rank * size + at[axis]
    return rank
