"""The blocks of a model that each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.pipeline import split_layers

_MANY_BLOCKS = 1000  # of one stage


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
        if pipe * chunks == 1:
            return cls((range(model.num_layers),))
        if model.num_layers > _MANY_BLOCKS * pipe * chunks:  # the head is then negligible
            each, more = divmod(model.num_layers, pipe * chunks)
            return cls.of_sizes([each + (v < more) for v in range(pipe * chunks)], pipe)
        costs = [model.block_flops_per_token()] * model.num_layers
        try:
            blocks = split_layers(costs, pipe * chunks, last=model.head_flops_per_token())
        except ValueError as error:
            raise ValueError(f"pipe={pipe}, chunks={chunks}: {error}") from None
        return cls(blocks, pipe)

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
