"""The products and collectives of a step, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from axonn_ext.spec.recompute import Recomputation


class Collective(NamedTuple):
    """One collective. num_bytes: the bytes that one rank sends."""

    axis: str
    kind: str  # "all_gather", "reduce_scatter", "all_reduce" or, between two stages, "send"
    num_bytes: int
    what: str  # "activations", "weights", "gradients", "norm", "loss", "grad norm", "order",
    # "parameters", which ZeRO's ranks all-gather, or "updates", which Muon orthogonalises


class Matmul(NamedTuple):
    """The product [m, k] @ [k, n].

    Its layout is in BLAS notation: NT in forward, NN for dgrad, TN for wgrad.
    """

    m: int
    n: int
    k: int
    layout: str

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


class Scores(NamedTuple):
    """Causal scaled dot products of whole sequences.

    flops: all operations that a causal mask leaves, half of those of full squares.
    """

    flops: int
    sequence_length: int
    head_dim: int


class Task(NamedTuple):
    """A task that the compute stream does in one piece.

    before, after    the collectives on the path before it, and those of its result
    gather           the gather of its weight over z, which may start earlier (Overlap.prefetch)
    scatter          the reduce-scatter of its weight's gradient over z, which may end later
                     (Overlap.deferred)
    scores           the scaled dot products of attention
    touched_bytes    the bytes that elementwise work reads and writes
    """

    name: str
    matmul: Matmul | None = None
    before: tuple[Collective, ...] = ()
    after: tuple[Collective, ...] = ()
    gather: Collective | None = None
    scatter: Collective | None = None
    scores: Scores | None = None
    touched_bytes: int = 0

    def collectives(self) -> Iterator[Collective]:
        yield from self.before
        if self.gather is not None:
            yield self.gather
        yield from self.after
        if self.scatter is not None:
            yield self.scatter


class Parts(NamedTuple):
    """The parts of a micro-batch.

    They are the embedding, one block, the norm with head and loss, and the backward passes of
    these. A block has two backward passes: one for blocks whose activations were kept, perhaps
    without those of attention, and one for blocks recomputed as a whole, which begins with the
    recomputation. If a stage has no embedding or head, these parts only handle the messages that it
    receives.
    """

    first_forward: tuple[Task, ...]
    block_forward: tuple[Task, ...]
    last_forward: tuple[Task, ...]
    last_backward: tuple[Task, ...]
    block_backward: tuple[Task, ...]
    recomputed_backward: tuple[Task, ...]
    first_backward: tuple[Task, ...]

    @property
    def num_forward(self) -> int:
        """The number of parts that are forward passes; they come first."""
        return 3


class Update(NamedTuple):
    """The update of a rank's part of a bucket.

    device_bytes  the bytes read and written on the device
    host_bytes    the bytes read and written on the host
    crossing      the bytes that go to the host, and as many come back
    gather        gives the new parameters to the other ranks of data
    """

    device_bytes: int
    host_bytes: int
    crossing: int
    gather: Collective | None


class OptimizerWork(NamedTuple):
    """What clipping and the optimizer do in a step.

    num_bytes  the bytes that they read and write on the device before the first bucket
    updates    the buckets' updates, in order; none if everything is updated at once
    matrices   with Muon, the tasks that orthogonalise matrices, before the updates, and how often
               each list of tasks runs; their products are in bf16
    sent       with Muon, the orthogonalised updates that cross data
    """

    num_bytes: int
    updates: tuple[Update, ...]
    matrices: tuple[tuple[tuple[Task, ...], int], ...] = ()
    sent: tuple[Collective, ...] = ()

    @property
    def flops(self) -> int:
        """The operations of all products."""
        return sum(
            times * task.matmul.flops
            for tasks, times in self.matrices
            for task in tasks
            if task.matmul is not None
        )

    @property
    def gathers(self) -> tuple[Collective, ...]:
        """The all-gathers of the new parameters."""
        return tuple(u.gather for u in self.updates if u.gather is not None)


class Program(NamedTuple):
    """The step of one rank.

    The parts run num_micro_batches times, those of a block num_layers times in each;
    `recomputation` says how many blocks are recomputed. Messages to other stages are sent
    alongside. The rest follows after the last micro-batch.

    messages       for each micro-batch
    sums_in_each   the sums of gradients for each micro-batch, during or after its backward (zero=2)
    gradient_sums  once per step
    norm_sums      once per step, after all gradients are complete: the gradients' norm, and in a
                   pipeline the loss
    """

    parts: Parts
    num_layers: int
    recomputation: Recomputation
    num_micro_batches: int
    messages: tuple[Collective, ...]
    sums_in_each: tuple[Collective, ...]
    gradient_sums: tuple[Collective, ...]
    norm_sums: tuple[Collective, ...]
    optimizer: OptimizerWork

    def micro_batch(self) -> Iterator[tuple[tuple[Task, ...], int]]:
        """Yields the parts of one micro-batch, and how often each runs."""
        layers = self.num_layers
        again = self.recomputation.num_blocks(layers)
        yield from zip(self.parts, (1, layers, 1, 1, layers - again, again, 1), strict=True)
