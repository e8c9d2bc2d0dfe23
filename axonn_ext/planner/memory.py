"""Computes the bytes that a rank holds, item by item, at the peak of a step.

Several moments of a step may be its peak. The bytes of each are computed, and the largest sum is
taken. In forward, these moments are the last block, lm_head and the loss. In backward, they are
lm_head, the last block (all activations are still kept), the first block (all gradients but the
table's are there) and the embedding. After backward, they are the sums of gradients and the
optimizer. The letters in formulas are explained in activations.py.

In a pipeline, stages hold different numbers of micro-batches; the fullest stage counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from axonn_ext.planner.activations import (
    Kept,
    ModelSizes,
    deferred_bytes_of,
    kept_of,
    sizes_of,
)
from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.in_flight import units_of
from axonn_ext.planner.job import Job
from axonn_ext.planner.machine import DEVICES
from axonn_ext.planner.program import parameters_of_share
from axonn_ext.planner.shares import StageShare, share_of, shares_of
from axonn_ext.spec.parallel import BUCKET_BYTES

_FP32, _FP64 = 4, 8
# Of a pipeline, in each direction: one that is sent, and one that has arrived. This is a guess: a
# stage that is late lets more of them wait.
_MESSAGES = 4


class Memory(NamedTuple):
    """The bytes of one rank at the peak of a step.

    parameters        the parameters in the job's dtype
    gradients         the complete gradients in the job's dtype. With one micro-batch, this is 0 if
                      the peak comes before or early in backward; `states_of` counts all gradients
    optimizer         AdamW's two moments in fp32, and fp32 masters of low-precision parameters
    gathered_weights  the weights that are held gathered over z
    activations       what all blocks keep for backward, and what one block needs while it runs; in
                      a pipeline, also what is kept of other micro-batches
    logits            what lm_head and the loss need
    buffers           the buffers of gradients that are being summed, of collectives and of ops, and
                      the angles of rotary positions
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_weights: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def largest(self) -> str:
        """The name of the largest item."""
        return max(self._fields, key=lambda name: getattr(self, name))


class States(NamedTuple):
    """The exact bytes of the state that lives from step to step, and of all gradients."""

    parameters: int
    gradients: int
    optimizer: int


class _Elements(NamedTuple):
    """The elements of a rank's parameters and of the gradients that must be summed after backward.

    own           all of the rank's parameters
    table         the rank's shard of the embedding table
    left          the gradients that must be summed after backward
    left_early    those of `left` that are complete before the table's gradient
    largest_left  the largest gradient of `left`; 0 if all of them are small
    """

    own: int
    table: int
    left: int
    left_early: int
    largest_left: int


# The bytes of gradients, gathered weights, activations, logits and buffers at one moment.
_Moment = tuple[int, int, int, int, int]


def states_of(job: Job, stage: int = 0) -> States:
    """Returns the bytes of each rank's parameters, of all its gradients, and of its optimizer.

    stage: the rank's pipe coordinate. For each parameter, the optimizer has two moments, a step
    count and, if the dtype is not fp32, a copy in fp32 (the master).
    """
    share = share_of(job, stage)
    return _states(job, share, parameters_of_share(job, share))


def _states(job: Job, share: StageShare, own: int) -> States:
    width = job.options.width
    masters = 0 if width == _FP32 else _FP32
    counts = _FP32 * sizes_of(job.model).num_tensors(share)
    return States(own * width, own * width, own * (2 * _FP32 + masters) + counts)


def memory_of(job: Job, *, device: str = "cuda") -> Memory:
    """Returns the memory that each rank of a legal job needs; in a pipeline, the fullest stage.

    device: "cuda" or "cpu". On the CPU, collectives copy bf16 to fp32 in order to sum it.

    Raises PlannerError for any other device.
    """
    if device not in DEVICES:
        raise PlannerError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if job.grid.pipe == 1:
        return _memory_of_stage(job, 0, device)
    stages = (_memory_of_stage(job, stage, device) for stage in _candidates(job))
    return max(stages, key=lambda memory: memory.total)


def stage_memory_of(job: Job, stage: int, *, device: str = "cuda") -> Memory:
    """Returns the memory of a rank of one pipe coordinate; see memory_of."""
    return _memory_of_stage(job, stage, device)


def _candidates(job: Job) -> range | list[int]:
    """Returns the stages of which one is the fullest.

    Of stages that have as much of the model, earlier ones have more micro-batches in flight.
    """
    if job.options.pipeline.defers:
        return range(job.grid.pipe)
    kinds: dict[StageShare, int] = {}
    for stage, share in enumerate(shares_of(job)):
        kinds.setdefault(share, stage)
    return list(kinds.values())


def _memory_of_stage(job: Job, stage: int, device: str) -> Memory:
    size, share = sizes_of(job.model), share_of(job, stage)
    elements = _elements_of(job, size, share)
    moments = _Step(job, stage, size, elements, device).moments()
    gradients, gathered_weights, activations, logits, buffers = max(moments, key=sum)
    states = _states(job, share, elements.own)
    return Memory(
        parameters=states.parameters,
        gradients=gradients,
        optimizer=states.optimizer,
        gathered_weights=gathered_weights,
        activations=activations,
        logits=logits,
        buffers=buffers + 2 * _FP64 * size.rotary,  # the angles of rotary positions
    )


def _elements_of(job: Job, size: ModelSizes, share: StageShare) -> _Elements:
    model, (x, y, z, data) = job.model, (job.grid.x, job.grid.y, job.grid.z, job.grid.data)
    own = parameters_of_share(job, share)
    tables = share.has_first + share.has_last
    tables = min(tables, 1) if size.tied else tables
    whole_table = size.vocab * size.hidden // (x * y * z)
    table = whole_table if tables else 0
    if data > 1:
        largest = max(table, size.runs[1] // (x * y * z))
        return _Elements(own, table, own, own - table, largest)
    small = 0
    if z > 1:
        matrices = share.num_layers * size.block // (x * y * z)
        small = own - matrices - table * tables  # norms, biases, positions
    elif x > 1 and job.options.sharded:  # all small parameters but biases
        vectors = (2 * share.num_layers + share.has_last) * size.norm_vectors
        small = (vectors + model.num_positions * share.has_first) * size.hidden // y
    if z == 1 and (x > 1 or (y > 1 and job.options.sharded)):  # norms of heads
        small += share.num_layers * model.head_norm_size
    return _Elements(own, table, small, small, 0)


class _Step:
    """The moments of one job on a pipe coordinate. Unless noted otherwise, sizes are bytes of one
    rank."""

    def __init__(
        self, job: Job, stage: int, size: ModelSizes, elements: _Elements, device: str
    ) -> None:
        options, grid = job.options, job.grid
        self.job, self.stage, self.share = job, stage, share_of(job, stage)
        self.layers = self.share.num_layers
        self.in_stages = grid.pipe > 1
        # The blocks of the virtual stage that is running.
        self.running = -(-self.layers // options.pipeline.chunks) if self.in_stages else self.layers
        # Only where one rank has both ends does a tied table wait for its second gradient.
        self.tied = size.tied and not self.in_stages
        self.size, self.options, self.elements = size, options, elements
        self.x, self.y, self.z = x, y, z = grid.x, grid.y, grid.z
        self.m, self.width = job.rows, options.width
        self.sharded = options.layout == "sharded"
        self.mx, self.my = (self.m // x, self.m // y) if self.sharded else (self.m, self.m)
        self.kept: Kept = kept_of(job, stage)
        self.overlap = options.overlap
        # The loss, overlap's buckets, the gradient norm and AdamW copy low precision to fp32.
        self.wide = _FP32 if self.width < _FP32 else 0
        # Collectives copy bf16 to fp32 only on the CPU (csrc/ops/composed/c10d_collectives.cpp).
        self.copy = _FP32 if device == "cpu" and options.dtype == "bf16" else 0
        self.sum_width = self.width + self.copy
        self.copied_parts = self.copy if self.sharded else 0
        self.regathers = z > 1 and self.overlap is None and options.reshard_after_forward
        self.block = size.block * self.width // (x * y)  # a block's weights, whole over z
        self.table = elements.table * z * self.width  # whole over z; 0 if the stage has none
        self.stream = self.mx * size.hidden // y * self.width

    def moments(self) -> list[_Moment]:
        """Returns the moments that may be the peak.

        In forward, these are the MLP of the last block, lm_head and the loss. In backward, they are
        lm_head, the last block, the first block and the embedding. The sums of gradients and the
        optimizer come last. A stage has those of the parts that it has.
        """
        everything = self.elements.own * self.width
        return [
            *self._moments_of_passes(),
            (everything, 0, 0, 0, self._sums()),
            (everything, 0, 0, 0, self._wide_gradients()),
        ]

    def _moments_of_passes(self) -> Iterator[_Moment]:
        if not self.in_stages:
            yield from self._moments_with(has_gradients=self.options.micro_batches > 1)
            return
        messages = self._messages()
        for has_gradients, others in self._other_units().items():
            for g, w, a, n, b in self._moments_with(has_gradients=has_gradients):
                yield g, w, a + others, n, b + messages

    def _moments_with(self, *, has_gradients: bool) -> Iterator[_Moment]:
        """Yields the moments of a micro-batch's passes.

        has_gradients: whether all gradients are there from the beginning, because earlier
        micro-batches have computed them.
        """
        size, kept, width, share = self.size, self.kept, self.width, self.share
        recompute = self.options.recompute
        everything = self.elements.own * width
        # At the first block, all gradients but the table's are there.
        gradients = everything if has_gradients else 0
        last_gradients = gradients or everything - self.elements.table * width
        held, first_held, last_held = self._gathered()
        each, again = (kept.block_input, kept.block) if recompute else (kept.block, 0)
        blocks = self.running * each + kept.received
        scattered = self.z > 1 and self.overlap is not None
        table = self.table if share.has_last else 0
        head_gradient = table if self.tied or scattered else table // self.z
        after_head = 2 * table if scattered and not self.tied else head_gradient
        forward, forward_buffers = self._block_forward()
        block, block_buffers = self._block_backward()
        block_buffers += self._scatters()
        # A tied table's gradient is complete only when the embedding's backward has run.
        waiting = head_gradient if self.tied else 0
        waiting += self._full_buckets()
        yield gradients, held, blocks + again + forward, 0, forward_buffers
        if share.has_last:
            head = size.vocab // self.x, size.hidden // self.y, self.x, self.y
            logits = self.my * head[0]
            loss = logits * (_FP32 + width + self.wide)
            ends = blocks + kept.ends
            yield gradients, held, ends, logits * width, self._forward_internals(*head, size.tied)
            yield gradients, held, ends, kept.loss + loss, 0
            inside = head_gradient + self._internals(*head, size.tied)
            yield (gradients, held, ends + self.stream, logits * width, max(after_head, inside))
        yield gradients, first_held, blocks + again + block, 0, after_head + block_buffers
        yield last_gradients, last_held, each + again + block, 0, waiting + block_buffers
        if share.has_first:
            yield last_gradients, 0, self._embedding_rows(), 0, waiting + self._table_sum()

    def _other_units(self) -> dict[bool, int]:
        """Returns what the stage keeps of other micro-batches than the one that it is at.

        That is what those in flight keep for backward, and what deferred weight gradients wait
        with; of each, as much for every chunk. The keys say whether there are gradients then.
        """
        pipeline = self.options.pipeline
        kept = self.kept.total(self.layers, recompute=self.options.recompute)
        deferred = deferred_bytes_of(self.job, self.stage) if pipeline.defers else 0
        most: dict[bool, int] = {}
        for units in units_of(self.job, self.stage):
            held = (units.in_flight - 1) * kept + units.deferred * deferred
            held //= pipeline.chunks
            most[units.has_gradients] = max(held, most.get(units.has_gradients, 0))
        return most

    def _messages(self) -> int:
        """Returns what messages take that are on their way."""
        whole = not self.sharded and self.m % self.x == 0
        return _MESSAGES * (self.stream // self.x if whole else self.stream)

    def _gathered(self) -> tuple[int, int, int]:
        """Returns the bytes of gathered weights at three moments of backward.

        These are its beginning, the block with which it begins, and the block with which it ends.
        """
        if self.z == 1:
            return 0, 0, 0
        size, kept = self.size, self.kept.weights
        if self.overlap is None:
            # The weights of lm_head are freed after its backward. With recomputation, only the
            # block that backward is at keeps its weights.
            one = 0 if self.options.reshard_after_forward else self.block
            return kept, one if self.options.recompute else one * self.running, one
        # If the embedding has its own table, only later micro-batches need it again.
        tables = 1 if size.tied or self.options.micro_batches == 1 or self.in_stages else 2
        total = self.layers * self.block + self.table * tables
        # Only a single weight that is larger than the budget may exceed it.
        single = size.runs[1] * self.width // (self.x * self.y)
        budget = max(self.overlap.gathered_bytes, single)
        ahead = (1 + self.overlap.prefetch) * self.block
        return (
            min(total, max(budget, self.table)),
            min(self.layers * self.block, budget),
            min(ahead, budget),
        )

    def _scatters(self) -> int:
        """Returns the buffers of weight gradients that are being summed over z.

        Each sum takes the whole gradient, which is sent, and as much again for what arrives from
        the other ranks.
        """
        if self.overlap is None or self.z == 1:
            return 0
        rounds, rest = divmod(self.overlap.deferred + 1, 4)
        elements = min(rounds * self.size.block + self.size.runs[rest],
                       self.layers * self.size.block)  # fmt: skip
        return 2 * elements * self.width // (self.x * self.y)

    def _block_forward(self) -> tuple[int, int]:
        """Returns what a block holds while the first Linear of its MLP runs.

        The first number is to be added to what the block keeps for backward. What the rest of the
        MLP keeps is subtracted in it, because the rest has not run yet. The second number is what
        the Linear itself needs.
        """
        size = self.size
        up = size.up // self.x
        internals = self._forward_internals(up, size.hidden // self.y, self.x, self.y, False)
        return self.stream + self.my * up * self.width - self._mlp_kept(), internals

    def _block_backward(self) -> tuple[int, int]:
        """Returns what a block's backward holds beside what is kept, and what its Linears need.

        Backward begins with the MLP: its down Linear, its activation and its up Linear. The one of
        these three that needs most counts. What the rest of the block keeps is still there then.
        """
        size, x, y = self.size, self.x, self.y
        hidden, inner, up = size.hidden // y, size.mlp // x, size.up // x
        mlp = self.my * inner * self.width
        down = mlp + (inside_down := self._internals(hidden, inner, y, x, False))
        # When the activation's backward runs, the input of the down Linear has been freed. For
        # silu(gate) * up, the gradients of both factors are there.
        activation = (3 if size.gated else 2) * mlp - self._down_input()
        inside_up = self._internals(up, hidden, x, y, False)
        up_total = self.my * up * self.width + self.stream - self._mlp_kept() + inside_up
        if up_total >= max(down, activation):
            return self.stream + up_total - inside_up, inside_up
        if down >= activation:
            return self.stream + mlp, inside_down
        return self.stream + activation, 0

    def _down_input(self) -> int:
        rows = self.m if self.sharded and self.options.save_gathered else self.my
        return rows * self.size.mlp // self.x * self.width

    def _mlp_kept(self) -> int:
        """Returns what the MLP keeps after its first Linear."""
        mlp = self.my * self.size.mlp // self.x * self.width
        return self._down_input() + (3 * mlp if self.size.gated else mlp)

    def _forward_internals(self, n: int, k: int, r: int, s: int, has_weight: bool) -> int:
        """Returns what a Linear, n x k on this rank, needs in forward.

        It needs the gathered weight and x, and the product before its sum. This is the algorithm
        "sequential"; the others do not need more. Source: csrc/ops/composed/linear_forward.cpp.

        r, s: the sizes of the Linear's axes. has_weight: whether the gathered weight is there
        already, like a tied table.
        """
        m, width = self.m, self.width
        inside = n * k * width if self.z > 1 and self.overlap is None and not has_weight else 0
        if self.sharded and r > 1:
            inside += m * k * width
        if s > 1:
            inside += m * n * self.sum_width + m * n // s * self.copied_parts
        return inside

    def _internals(self, n: int, k: int, r: int, s: int, has_weight: bool) -> int:
        """Returns what the backward of a Linear needs; see _forward_internals for the arguments.

        It needs the gathered dy throughout. Beside it, dgrad needs the gathered weight, and dx
        before its sum; after that, wgrad needs the gathered x, and the weight's gradient before its
        sum.
        """
        m, width = self.m, self.width
        dy = m * n * width if self.sharded and s > 1 else 0
        dgrad = n * k * width if self.regathers and not has_weight else 0
        wgrad = 0
        if r > 1:
            dgrad += m * k * self.sum_width + m * k // r * self.copied_parts
            if self.sharded and not self.options.save_gathered:
                wgrad = m * k * width
        if self.z > 1 and self.overlap is None and not has_weight:
            wgrad += n * k * self.sum_width + n * k // self.z * self.copy
        return dy + max(dgrad, wgrad)

    def _embedding_rows(self) -> int:
        """Returns the bytes that the gradient of the embedding's rows takes.

        It is gathered over x, and copied with zeros in the rows whose ids belong to other ranks.
        """
        whole = self.m * self.size.hidden // self.y * self.width
        return self.stream + whole + (whole if self.x > 1 and self.sharded else 0)

    def _table_sum(self) -> int:
        """Returns the bytes that the gradient of the embedding's table and its sum over z take."""
        table, part = self.table, self.table // self.z
        if self.z == 1:
            return table
        if self.overlap is None:
            return table // self.width * self.sum_width
        arrived = table if self.tied else 2 * table
        return arrived + part // self.width * (_FP32 + self.wide)

    def _full_buckets(self) -> int:
        """Returns by how many bytes the buckets that are summed during backward exceed gradients.

        There are such buckets only with overlap, and at most two at a time. A bucket is in fp32,
        and replaces the gradients that it holds.
        """
        if self.overlap is None or not self.wide:
            return 0
        bucket_bytes = self.overlap.bucket_bytes
        full = self.elements.left_early * self.width // bucket_bytes
        return min(full, 2) * bucket_bytes // self.width * (_FP32 - self.width)

    def _sums(self) -> int:
        """Returns the buffers of the sums of gradients after backward.

        With overlap, these are a bucket in fp32 that is being filled, and one that is summed and
        replaces its gradients. Without overlap, they are a bucket and its sum, and on the CPU as
        much again for copies that the collective makes. The bucket before is held until the next
        one exists, and its sum until the next sum exists.
        """
        left = self.elements.left * self.width
        if left == 0:
            return 0
        limit = BUCKET_BYTES if self.overlap is None else self.overlap.bucket_bytes
        bucket = max(min(left, limit), self.elements.largest_left * self.width)
        following = min(bucket, left - bucket)
        if self.overlap is not None:
            return (bucket * _FP32 + following * (_FP32 - self.width)) // self.width
        if not self.copy:
            return 2 * bucket + following
        return max(4 * bucket, bucket + 4 * following)

    def _wide_gradients(self) -> int:
        """Returns the fp32 copies of low-precision gradients that the gradient norm and AdamW make.

        The norm's copies are freed before AdamW makes its own.
        """
        return self.elements.own * self.wide
