"""The blocks of a model that each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from axonn_ext.spec.model import ModelConfig


@dataclass(frozen=True)
class Stages:
    """The blocks of each virtual stage, in order.

    Virtual stage v is on pipe coordinate v % pipe. With one virtual stage on each coordinate these
    are the stages; with several, the schedule "interleaved" runs them in turn.

    Raises ValueError if the blocks are not consecutive from 0 on, a virtual stage has none, or pipe
    does not divide the number of virtual stages, or is 1 with several of them.
    """

    blocks: tuple[range, ...]
    pipe: int = 1

    def __post_init__(self) -> None:
        if not self.blocks or len(self.blocks) % self.pipe:
            raise ValueError(
                f"stages: the number of virtual stages must be a multiple of pipe={self.pipe}, "
                f"got {len(self.blocks)}"
            )
        if self.pipe == 1 and len(self.blocks) > 1:
            raise ValueError(
                f"stages: several stages on each rank need pipe >= 2, got {len(self.blocks)} on "
                "pipe=1"
            )
        first = 0
        for number, blocks in enumerate(self.blocks):
            if blocks.start != first or blocks.step != 1 or not blocks:
                raise ValueError(
                    f"stages: virtual stage {number} must have blocks from {first} on, got {blocks}"
                )
            first = blocks.stop

    @classmethod
    def balanced(cls, model: ModelConfig, pipe: int = 1, chunks: int = 1) -> Stages:
        """Returns stages whose largest number of operations is the least possible.

        The last stage has the head in addition to its blocks. Raises ValueError if the model has
        fewer blocks than there are virtual stages.
        """
        head = -(-model.head_flops_per_token() // model.block_flops_per_token())
        try:
            return cls.split(model.num_layers, pipe, chunks, head=head)
        except ValueError as error:
            raise ValueError(f"pipe={pipe}, chunks={chunks}: {error}") from None

    @classmethod
    def split(cls, num_layers: int, pipe: int = 1, chunks: int = 1, *, head: int = 0) -> Stages:
        """Returns stages whose largest cost is the least possible; every layer costs the same.

        head: how many layers the head of the last stage costs, rounded up. Of several such splits,
        this is the most even one, by the sum of squares, and of these the one whose first stage has
        the fewest layers, then the second, and so on: early stages hold more micro-batches. Raises
        ValueError for fewer layers than virtual stages.
        """
        parts = pipe * chunks
        if num_layers < parts:
            raise ValueError(f"{num_layers} layers cannot be split into {parts} parts")
        # The most that leave every other stage head + last - 1 layers: the last one of these costs
        # no more there than elsewhere, and a further one would.
        last = max(1, (num_layers - (head - 1) * (parts - 1)) // parts)
        each, more = divmod(num_layers - last, max(parts - 1, 1))
        return cls.of_sizes([*[each] * (parts - 1 - more), *[each + 1] * more, last], pipe)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], pipe: int = 1) -> Stages:
        """Returns stages with these numbers of blocks."""
        ends = [0, *accumulate(sizes)]
        return cls(tuple(range(first, end) for first, end in pairwise(ends)), pipe)

    @property
    def num_virtual(self) -> int:
        """The number of virtual stages."""
        return len(self.blocks)

    @property
    def chunks(self) -> int:
        """The number of virtual stages on each pipe coordinate."""
        return len(self.blocks) // self.pipe

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the whole model."""
        return self.blocks[-1].stop

    def on(self, coordinate: int) -> range:
        """Returns the numbers of the virtual stages on a pipe coordinate."""
        return range(coordinate, len(self.blocks), self.pipe)

    def has_first(self, coordinate: int) -> bool:
        """Whether the embedding is on this pipe coordinate."""
        return coordinate == 0

    def has_last(self, coordinate: int) -> bool:
        """Whether the head and the loss are on this pipe coordinate."""
        return coordinate == self.pipe - 1
