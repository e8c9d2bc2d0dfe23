"""Describes a step of one rank: every product and collective, in the order of execution.

Volumes, times and timelines are all computed from this description. It follows the modules of
`axonn_ext.nn` and `axonn_ext.models`; tests compare it, byte for byte, with what they issue.

On a grid with pipe > 1, ranks of different stages have different steps; each function takes the
pipe coordinate `stage`.

Legend: m rows (tokens) of a (data, z) group in a micro-batch; a Linear [N, K] of role (r, s); Gx
the size of axis x. The bytes of a collective are those that one rank sends in the algorithm that
sends least. Sources of the volumes: arXiv:2305.13525 and arXiv:2502.08145 (`replicated`);
docs/architecture.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from axonn_ext.planner.job import Job
from axonn_ext.planner.shares import StageShare, share_of, shares_of
from axonn_ext.planner.tasks import Collective, Matmul, Parts, Program, Task
from axonn_ext.spec.grid import SUM_ORDER
from axonn_ext.spec.model import LinearSpec
from axonn_ext.spec.parallel import BUCKET_BYTES, ROLES

_FP32, _FP64 = 4, 8


def most_bytes_by_axis(job: Job) -> dict[str, int]:
    """Returns, for each axis of several ranks, the bytes that a rank sends along it in a step.

    If stages send different numbers, it is the largest one of each axis.
    """
    most: dict[str, int] = {}
    first_of_its_kind = {share: stage for stage, share in reversed([*enumerate(shares_of(job))])}
    for stage in first_of_its_kind.values():
        for axis, num_bytes in bytes_by_axis(make_program(job, stage)).items():
            most[axis] = max(num_bytes, most.get(axis, 0))
    return most


def bytes_by_axis(program: Program) -> dict[str, int]:
    """Returns the bytes that a rank sends along each axis of several ranks in a step.

    Between stages, activations, their gradients and sums count. What a pipeline says besides (the
    form of its first messages, decisions of message_driven, and totals of all ranks) does not.
    """
    total: Counter[str] = Counter()
    for c, times in all_collectives(program):
        total[c.axis] += c.num_bytes * times
    return {axis: n for axis, n in total.items() if n}


def all_collectives(program: Program) -> Iterator[tuple[Collective, int]]:
    """Yields every collective and message of a step, and how often it is issued."""
    parts = program.num_micro_batches
    for c in program.messages:
        yield c, parts
    for tasks, repeats in program.micro_batch():
        for task in tasks:
            for c in task.collectives():
                yield c, repeats * parts
    for c in (*program.gradient_sums, *program.norm_sums):
        yield c, 1


def make_program(job: Job, stage: int = 0) -> Program:
    """Returns the step of a legal job on a pipe coordinate.

    With overlap, every use of a weight has a gather; the schedule leaves out those of weights that
    are still held.
    """
    step = _Step(job, stage)
    return Program(
        parts_of(job, stage),
        num_layers=step.share.num_layers,
        num_micro_batches=job.options.micro_batches,
        messages=step.messages(),
        gradient_sums=(*step.gradient_sums(), *step.sum_over_ends()),
        norm_sums=step.norm_sums(),
        optimizer_bytes=step.optimizer_bytes(),
    )


def parts_of(job: Job, stage: int = 0) -> Parts:
    """Returns the parts of a micro-batch of a legal job on a pipe coordinate."""
    step = _Step(job, stage)
    share = step.share
    block_forward = step.block_forward()
    recomputed = block_forward if job.options.recompute else ()
    return Parts(
        (*(step.embedding_forward() if share.has_first else ()), *step.unpacked("activations")),
        block_forward,
        step.last_forward() if share.has_last else (),
        (*step.unpacked("gradients"), *(step.last_backward() if share.has_last else ())),
        (*recomputed, *step.block_backward()),
        step.embedding_backward() if share.has_first else (),
    )


class _Step:
    """Makes the tasks of one job on a pipe coordinate."""

    def __init__(self, job: Job, stage: int = 0) -> None:
        self.job, self.model, self.options = job, job.model, job.options
        self.stage, self.share = stage, share_of(job, stage)
        self.in_stages = job.grid.pipe > 1
        self.size = job.grid.as_dict()
        self.m, self.width = job.rows, job.options.width
        sharded = job.options.sharded
        self.m_x = self.m // self.size["x"] if sharded else self.m  # rows of the residual stream
        self.m_y = self.m // self.size["y"] if sharded else self.m  # rows of MLP and logits
        self.gathers, self.sums = "all_gather", "reduce_scatter" if sharded else "all_reduce"

    def collective(
        self, kind: str, axis: str, num_elements: int, width: int, what: str
    ) -> Collective | None:
        """Returns a collective; None on an axis of one rank.

        num_elements: the elements that a rank passes in, as for torch.distributed.
        """
        g = self.size[axis]
        if g == 1 or num_elements == 0:
            return None
        passed = (g - 1) * num_elements
        if kind == "all_reduce":
            passed = -(-2 * passed // g)
        elif kind == "reduce_scatter":
            passed = -(-passed // g)
        return Collective(axis, kind, passed * width, what)

    @staticmethod
    def present(collectives: Iterable[Collective | None]) -> tuple[Collective, ...]:
        return tuple(c for c in collectives if c is not None)

    # --- Linears ---------------------------------------------------------------------------------

    def _weight(self, linear: LinearSpec, kind: str) -> Collective | None:
        r, s = ROLES[linear.role]
        block = linear.n * linear.k // (self.size[r] * self.size[s])
        if kind == "all_gather":
            return self.collective(kind, "z", block // self.size["z"], self.width, "weights")
        return self.collective(kind, "z", block, self.width, "gradients")

    def linear_forward(self, linear: LinearSpec, *, gathers: bool = True) -> Task:
        """Returns the forward task. gathers: the task gathers the weight itself."""
        r, s = ROLES[linear.role]
        n, k = linear.n // self.size[r], linear.k // self.size[s]
        before = self._gather_rows(r, k)
        after = self.collective(self.sums, s, self.m * n, self.width, "activations")
        return Task(
            linear.name, Matmul(self.m, n, k, "NT"), before, self.present([after]),
            gather=self._weight(linear, "all_gather") if gathers else None,
        )  # fmt: skip

    def linear_backward(
        self, linear: LinearSpec, *, gathers: bool = True, scatters: bool = True
    ) -> tuple[Task, Task]:
        """Returns dgrad and wgrad.

        gathers: the tasks gather the weight themselves. scatters: they also scatter its gradient.
        """
        r, s = ROLES[linear.role]
        n, k = linear.n // self.size[r], linear.k // self.size[s]
        kept = not self.options.reshard_after_forward and self.options.overlap is None
        regather = self.options.sharded and not self.options.save_gathered
        # A weight gradient that is computed apart from backward gathers dy once more.
        apart = self.in_stages and self.options.pipeline.defers
        before = self._gather_rows(s, n) if apart else ()
        after = self.collective(self.sums, r, self.m * k, self.width, "activations")
        dgrad = Task(
            f"{linear.name} dgrad", Matmul(self.m, k, n, "NN"), self._gather_rows(s, n),
            self.present([after]),
            gather=self._weight(linear, "all_gather") if gathers and not kept else None,
        )  # fmt: skip
        wgrad = Task(
            f"{linear.name} wgrad", Matmul(n, k, self.m, "TN"),
            (*before, *self._gather_rows(r, k)) if regather else before,
            scatter=self._weight(linear, "reduce_scatter") if scatters else None,
            touched_bytes=self._summed_bytes(linear) if scatters else 0,
        )  # fmt: skip
        return dgrad, wgrad

    def _summed_bytes(self, linear: LinearSpec) -> int:
        """Returns the bytes touched when the blocks of a gradient that arrive over z are added.

        This counts only with overlap, where the blocks are added in fp32 after they have arrived;
        the ops add them while they communicate.
        """
        if self.options.overlap is None or self.size["z"] == 1:
            return 0
        r, s = ROLES[linear.role]
        block = linear.n * linear.k // (self.size[r] * self.size[s])
        return block * (self.width + 2 * _FP32)

    def _gather_rows(self, axis: str, features: int) -> tuple[Collective, ...]:
        """Returns the gather of all m rows, which are scattered over the axis in `sharded`."""
        if not self.options.sharded:
            return ()
        shard = self.m // self.size[axis] * features
        return self.present([self.collective("all_gather", axis, shard, self.width, "activations")])

    # --- Blocks ----------------------------------------------------------------------------------

    def block_forward(self) -> tuple[Task, ...]:
        qkv, out, up, down = (self.linear_forward(w) for w in self.model.block_linears)
        norm_1, norm_2 = (self.norm(f"norm_{i}", backward=False) for i in (1, 2))
        return (norm_1, qkv, self.attention(backward=False), out,
                norm_2, up, self.activation(backward=False), down)  # fmt: skip

    def block_backward(self) -> tuple[Task, ...]:
        # Recomputation ends with the Linear with which backward begins, so its weight is held.
        held = self.options.recompute and self.options.overlap is not None
        qkv, out, up, down = (self.linear_backward(w) for w in self.model.block_linears)
        if held:
            down = (down[0]._replace(gather=None), down[1])
        norm_1, norm_2 = (self.norm(f"norm_{i}", backward=True) for i in (1, 2))
        return (*down, self.activation(backward=True), *up, norm_2,
                *out, self.attention(backward=True), *qkv, norm_1)  # fmt: skip

    def norm(self, name: str, *, backward: bool) -> Task:
        """Returns the task of a norm, and of the addition to the residual stream.

        The statistics of a row cross y in fp32. RMSNorm all-reduces one number in each direction;
        LayerNorm gathers two numbers of each rank in forward, and all-reduces two in backward.
        """
        norm = self.model.traits.norm
        kind = "all_gather" if norm.gathers and not backward else "all_reduce"
        sums = self.collective(kind, "y", norm.num_statistics * self.m_x, _FP32, "norm")
        elements = self.m_x * self.model.hidden_size // self.size["y"]
        passes = 8 if backward else 6  # reads and writes of norm and residual together, a guess
        return Task(
            f"{name} {'backward' if backward else 'forward'}", before=self.present([sums]),
            touched_bytes=passes * elements * self.width,
        )  # fmt: skip

    def attention(self, *, backward: bool) -> Task:
        """Returns causal attention over whole sequences; in `replicated`, y ranks repeat it."""
        model = self.model
        rows = self.m_y
        forward = 2 * rows * model.sequence_length * model.attention_size // self.size["x"]
        features = model.qkv_size + model.attention_size
        return Task(
            f"attention {'backward' if backward else 'forward'}",
            # Backward computes the scores again: 5 products for forward's 2 (arXiv:2205.14135).
            attention_flops=forward * 5 // 2 if backward else forward,
            touched_bytes=(2 if backward else 1) * rows * features // self.size["x"] * self.width,
        )

    def activation(self, *, backward: bool) -> Task:
        model = self.model
        elements = self.m_y * (model.up_size + model.mlp_size) // self.size["x"]
        return Task(
            f"activation {'backward' if backward else 'forward'}",
            touched_bytes=(2 if backward else 1) * elements * self.width,
        )

    # --- Both ends -------------------------------------------------------------------------------

    def embedding_forward(self) -> tuple[Task, ...]:
        elements = self.m * self.model.hidden_size // self.size["y"]
        after = self.collective(self.sums, "x", elements, self.width, "activations")
        return (
            Task(
                "embedding", after=self.present([after]), gather=self._table("all_gather"),
                touched_bytes=3 * elements * self.width,
            ),
        )  # fmt: skip

    def embedding_backward(self) -> tuple[Task, ...]:
        shard = self.m_x * self.model.hidden_size // self.size["y"]
        gather = None
        if self.options.sharded:
            gather = self.collective("all_gather", "x", shard, self.width, "activations")
        block = self.model.head.n * self.model.head.k // (self.size["x"] * self.size["y"])
        return (
            Task(
                "embedding backward", before=self.present([gather]),
                scatter=self._table("reduce_scatter"),
                touched_bytes=(2 * shard + 2 * block) * self.width
                + self._summed_bytes(self.model.head),
            ),
        )  # fmt: skip

    def _table(self, kind: str) -> Collective | None:
        """Returns a collective of the table, which always has the layout of lm_head's weight."""
        return self._weight(self.model.head, kind)

    def last_forward(self) -> tuple[Task, ...]:
        return (self.norm("norm", backward=False), *self.head_forward(), self.loss())

    def last_backward(self) -> tuple[Task, ...]:
        return (*self.head_backward(), self.norm("norm", backward=True))

    def head_forward(self) -> tuple[Task, ...]:
        return (self.linear_forward(self.model.head, gathers=self._head_gathers or self.in_stages),)

    def head_backward(self) -> tuple[Task, ...]:
        scatters = self.in_stages or not self.model.tie_embeddings
        return self.linear_backward(self.model.head, gathers=self._head_gathers, scatters=scatters)

    @property
    def _head_gathers(self) -> bool:
        """Whether lm_head gathers its weight itself.

        A tied table is gathered once per micro-batch, for the embedding (in a pipeline, whose last
        stage has no embedding, for lm_head). With overlap it is gathered like other weights, at
        each use at which it is not held.
        """
        return not self.model.tie_embeddings or self.options.overlap is not None

    def loss(self) -> Task:
        """Returns the loss: three numbers per row cross x, and one in all the axes of the rows.

        In a pipeline, the latter cross once per step, in a group of all ranks that is not counted.
        """
        row_axes = () if self.in_stages else self._row_axes
        before = [self.collective("all_reduce", "x", n * self.m_y, _FP32, "loss") for n in (1, 2)]
        after = [self.collective("all_reduce", axis, 1, _FP32, "loss") for axis in row_axes]
        logits = self.m_y * self.model.vocab_size // self.size["x"]
        return Task(
            "loss", before=self.present(before), after=self.present(after),
            # It is a guess that the logits are read in the model's dtype, and then written and read
            # in fp32 three times each.
            touched_bytes=logits * (2 * self.width + 6 * _FP32),
        )  # fmt: skip

    @property
    def _row_axes(self) -> tuple[str, ...]:
        """The axes that split the rows of logits."""
        return ("y", "z", "data") if self.options.sharded else ("z", "data")

    # --- Between stages --------------------------------------------------------------------------

    @property
    def _shares_x(self) -> bool:
        """Whether each rank of x sends a part of the rows, which are equal on all of them."""
        return not self.options.sharded and self.m % self.size["x"] == 0

    @property
    def _message_elements(self) -> int:
        rows = self.m_x // self.size["x"] if self._shares_x else self.m_x
        return rows * self.model.hidden_size // self.size["y"]

    def messages(self) -> tuple[Collective, ...]:
        """Returns what a rank sends to its neighbours for each micro-batch."""
        num_bytes = self._message_elements * self.width
        return (
            *[Collective("pipe", "send", num_bytes, "activations")] * self.share.forward_sends,
            *[Collective("pipe", "send", num_bytes, "gradients")] * self.share.backward_sends,
        )

    def unpacked(self, what: str) -> tuple[Task, ...]:
        """Returns the gathers of received messages of which each rank of x has a part.

        what: "activations" or "gradients".
        """
        if not self._shares_x or self.size["x"] == 1:
            return ()
        share = self.share
        count = share.backward_sends if what == "activations" else share.forward_sends
        gather = self.collective("all_gather", "x", self._message_elements, self.width, what)
        return (Task(f"receive {what}", before=self.present([gather])),) * count

    # --- Gradients and optimizer -----------------------------------------------------------------

    def gradient_sums(self) -> Iterator[Collective]:
        """Yields the sums that backward has left: all-reduces of buckets, in the model's order.

        With overlap, a bucket is summed in fp32 over one axis after the other. Which gradients are
        in a bucket then depends on the order in which backward completes them; this changes the
        bytes by less than one element per bucket.
        """
        overlap = self.options.overlap
        width = self.width if overlap is None else _FP32
        bucket_bytes = BUCKET_BYTES if overlap is None else overlap.bucket_bytes
        for axis in SUM_ORDER:
            if self.size[axis] == 1:
                continue
            elements = 0
            for count, axes in self.parameters():
                if axis not in axes:
                    continue
                if elements and (elements + count) * self.width > bucket_bytes:
                    yield from self._bucket(axis, elements, width)
                    elements = 0
                elements += count
            yield from self._bucket(axis, elements, width)
        if overlap is not None:
            # Once per step, the lanes compare digests of 8 bytes of what they have issued.
            # There is one for z, over which weights are gathered, and for each axis of sums.
            used = {"z"}.union(*(axes for _, axes in self.parameters()))
            compared = (axis for axis in SUM_ORDER if axis in used)
            digests = (self.collective("all_gather", axis, 1, 8, "order") for axis in compared)
            yield from self.present(digests)

    def sum_over_ends(self) -> tuple[Collective, ...]:
        """Returns the sum of a tied table's gradient over the first and the last stage."""
        at_an_end = self.share.has_first or self.share.has_last
        if not (self.in_stages and at_an_end and self.model.tie_embeddings):
            return ()
        num_bytes = self._elements(self.model.head) * self.width  # each of two ranks sends it once
        return (Collective("pipe", "all_reduce", num_bytes, "gradients"),)

    def norm_sums(self) -> tuple[Collective, ...]:
        """Returns the sums of the norm of all gradients."""
        axes = ("x", "y", "z", "pipe")
        return self.present([self.collective("all_reduce", a, 1, _FP64, "grad norm") for a in axes])

    def _bucket(self, axis: str, elements: int, width: int) -> tuple[Collective, ...]:
        return self.present([self.collective("all_reduce", axis, elements, width, "gradients")])

    def parameters(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields this rank's elements of each parameter, in the model's order, and the axes over
        which its gradient must be summed after backward."""
        model, size = self.model, self.size
        rows = ("x", "z", "data") if self.options.sharded else ("z", "data")
        norm = [(model.hidden_size // size["y"], rows)] * model.traits.norm.num_vectors
        of_heads = ("x", "y", "z", "data") if self.options.sharded else ("x", "z", "data")
        head_norms = [(model.head_dim, of_heads)] * (2 * model.traits.has_head_norms)
        table = (self._elements(model.head), ("data",))
        has_first, has_last = self.share.has_first, self.share.has_last
        if has_first or (has_last and model.tie_embeddings):
            yield table
        if has_first and model.num_positions:
            yield model.num_positions * model.hidden_size // size["y"], rows
        qkv, out, up, down = (list(self._linear_parameters(w)) for w in model.block_linears)
        for _ in range(self.share.num_layers):
            yield from (*norm, *qkv, *out, *head_norms, *norm, *up, *down)
        if has_last:
            yield from norm
            if not model.tie_embeddings:
                yield table

    def _linear_parameters(self, linear: LinearSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
        yield self._elements(linear), ("data",)
        if linear.bias:
            yield linear.n // self.size[ROLES[linear.role][0]], ("z", "data")

    def _elements(self, linear: LinearSpec) -> int:
        return linear.n * linear.k // (self.size["x"] * self.size["y"] * self.size["z"])

    def optimizer_bytes(self) -> int:
        """The bytes that clipping and AdamW read and write.

        Clipping reads the gradients for their norm, and scales them. AdamW reads parameter,
        gradient and two moments in fp32, and writes all but the gradient. In low precision, the
        gradient is first cast to fp32, and the parameter is cast back at the end.
        """
        own = parameters_of_rank(self.job, self.stage)
        casts = 0 if self.width == _FP32 else 2 * (self.width + _FP32)
        return own * (7 * _FP32 + casts + 3 * self.width)


def parameters_of_rank(job: Job, stage: int = 0) -> int:
    """Returns the elements of the parameters that each rank of a pipe coordinate holds."""
    return parameters_of_share(job, share_of(job, stage))


def parameters_of_share(job: Job, share: StageShare) -> int:
    """Returns the elements of the parameters that each rank with that share holds."""
    model, grid = job.model, job.grid
    vectors = (2 * share.num_layers + share.has_last) * model.traits.norm.num_vectors
    vectors += model.num_positions * share.has_first  # each has H elements
    block = sum(w.n * w.k for w in model.block_linears)
    tables = share.has_first + share.has_last
    if model.tie_embeddings:
        tables = min(tables, 1)
    biases = sum(w.n // getattr(grid, ROLES[w.role][0]) for w in model.block_linears if w.bias)
    matrices = share.num_layers * block + tables * model.head.n * model.head.k
    return (
        matrices // (grid.x * grid.y * grid.z)
        + share.num_layers * (biases + model.head_norm_size)
        + vectors * model.hidden_size // grid.y
    )


def model_flops_of_rank(job: Job) -> int:
    """Returns the model flops of one step, divided by the number of ranks.

    Recomputation does not count.
    """
    tokens = job.model.sequence_length * job.batch_size
    return job.model.flops_per_token() * tokens // job.grid.size
