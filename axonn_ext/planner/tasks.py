"""What a step is made of: products, collectives, and the order that they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Collective(NamedTuple):
    """One collective. num_bytes: what one rank sends."""

    axis: str
    kind: str  # "all_gather", "reduce_scatter" or "all_reduce"
    num_bytes: int
    what: str  # "activations", "weights", "gradients", "norm", "loss", "grad norm", "order"


class Matmul(NamedTuple):
    """[m, k] @ [k, n]; layout as BLAS writes it: NT forward, NN dgrad, TN wgrad."""

    m: int
    n: int
    k: int
    layout: str

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


class Task(NamedTuple):
    """What the compute stream does at once.

    before, after   collectives that it waits for, and that its result goes through, on the path
    gather          of its weight over z: may be under way earlier (Overlap.prefetch)
    scatter         of its weight's gradient over z: may be under way later (Overlap.deferred)
    attention_flops of scaled dot products; touched_bytes: of memory, read and written elementwise
    """

    name: str
    matmul: Matmul | None = None
    before: tuple[Collective, ...] = ()
    after: tuple[Collective, ...] = ()
    gather: Collective | None = None
    scatter: Collective | None = None
    attention_flops: int = 0
    touched_bytes: int = 0

    @property
    def is_forward(self) -> bool:
        """Whether it is a Linear's product in forward (recomputed or not)."""
        return self.matmul is not None and self.matmul.layout == "NT"

    def collectives(self) -> Iterator[Collective]:
        yield from self.before
        if self.gather is not None:
            yield self.gather
        yield from self.after
        if self.scatter is not None:
            yield self.scatter


class Parts(NamedTuple):
    """Of a micro-batch: the embedding, a block, norm and head and loss, and back again.
    `block_backward` begins with what is recomputed."""

    first_forward: tuple[Task, ...]
    block_forward: tuple[Task, ...]
    last_forward: tuple[Task, ...]
    last_backward: tuple[Task, ...]
    block_backward: tuple[Task, ...]
    first_backward: tuple[Task, ...]


class Program(NamedTuple):
    """One rank's step: num_micro_batches times its parts, those of a block num_layers times, then
    what follows the last micro-batch."""

    parts: Parts
    num_layers: int
    num_micro_batches: int
    gradient_sums: tuple[Collective, ...]  # once a step
    norm_sums: tuple[Collective, ...]  # once a step, after all gradients are complete
    optimizer_bytes: int  # of memory, read and written

    def micro_batch(self) -> Iterator[tuple[tuple[Task, ...], int]]:
        """The parts of one micro-batch and how often each is repeated in a row."""
        layers = self.num_layers
        yield from zip(self.parts, (1, layers, 1, 1, layers, 1), strict=True)
