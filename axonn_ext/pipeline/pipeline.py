"""The pipeline: one object per rank, which runs forward and backward of whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.models.transformer import Transformer
from axonn_ext.nn.deferred import DeferredWeightGradients
from axonn_ext.optim import gradients
from axonn_ext.overlap import Orchestrator
from axonn_ext.pipeline.choice import Leader, MessageDriven
from axonn_ext.pipeline.engine import EVALUATION, TRAINING, StepRun, StepStats
from axonn_ext.pipeline.failures import Failures, PipelineError
from axonn_ext.pipeline.gpu import Pace, gpu_of
from axonn_ext.pipeline.inbox import Inbox
from axonn_ext.pipeline.messages import BACKWARD, DIRECTIONS, FORWARD, Delay, Message
from axonn_ext.pipeline.models import Layer, Loss
from axonn_ext.pipeline.neighbours import Neighbours
from axonn_ext.pipeline.staging import on_all_ranks, stage
from axonn_ext.pipeline.totals import Totals
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec import settings
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline import Task, fixed_order
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.stages import Stages


class Pipeline:
    """Trains a model whose blocks are split into stages over the axis `pipe` of a grid.

        model = axonn_ext.models.build(config, grid)         this rank's stage of a transformer
        with Pipeline(model, grid) as pipeline:
            for step in ...:
                loss = pipeline.step([MicroBatch(ids, labels), ...])
                pipeline.sync_gradients()
                axonn_ext.clip_grad_norm_(pipeline.module, 1.0)
                optimizer.step(); optimizer.zero_grad()      over pipeline.module.parameters()

    A message between two stages is one rank's block of the activation, [m / Gx, H / Gy], or of its
    gradient; in layout "replicated" each rank of x sends a part of the rows, which the ranks of x
    of the next stage gather. Gradients of a parameter are added in the order of micro-batches,
    whatever order the stages run tasks in, so every run has the same bits.

    All ranks make the same pipelines in the same order, and call the same methods. Parameters and
    micro-batches are on the CPU, or on each rank's GPU with a grid over NCCL; the latter has not
    yet run on a GPU. Making a pipeline is collective: an all-gather and an all-reduce over all
    ranks, on GPUs the connections of neighbouring stages and a barrier, then all-gathers along
    pipe. It raises PipelineError if a rank does not take part.

    Args:
        model: a model of axonn_ext.models on the grid; or a list of modules, each of which takes
            the output, a tensor, of the one before. Instead of a module, the list may have a
            function that makes it; only ranks of its stage call the function.
        options: the schedule, and its limits; see PipelineOptions.
        loss: for a list of modules: loss(output of the last one, targets), a mean; ranks of x and y
            must return the same.
        stages: for a list of modules: which of them each stage has; default: an even split.
        overlap: overlaps weight gathers and gradient sums with computation; see Orchestrator.
        delay: seconds by which a message is delayed, for benchmarks and tests.

    Raises:
        TypeError, ValueError: model, loss and options that do not fit together.
        PipelineError (from `step` and `evaluate`): a stage failed, or a message has another shape
            or did not come within AXONN_TIMEOUT_SECONDS. The rank that fails first raises its own
            error; all others raise this one, which contains it.
    Source: AxoNN, arXiv:2110.13005, section 3; zero bubble, arXiv:2401.10241.
    """

    def __init__(
        self,
        model: Transformer | Sequence[Layer],
        grid: Grid,
        options: PipelineOptions | None = None,
        *,
        loss: Loss | None = None,
        stages: Stages | None = None,
        overlap: Overlap | None = None,
        delay: Delay | None = None,
    ) -> None:
        self.options = options or PipelineOptions()
        self.grid = grid
        self._model = on_all_ranks(
            lambda: stage(model, grid, self.options, loss=loss, stages=stages)
        )
        self._axis = grid.axis("pipe")
        self._failures = Failures(settings.load().timeout_seconds)
        self._totals = Totals(grid, self._failures)
        self._device = next(self.module.parameters()).device
        gpu = gpu_of(self._device)
        self._totals.compare({"stages on a GPU": int(gpu is not None)})
        self.orchestrator = None if overlap is None else Orchestrator(self.module, overlap)
        self._deferring = DeferredWeightGradients(self.module) if self.options.defers else None
        self._failed = ""  # the error of a failed step
        self._pace = None if gpu is None else Pace(gpu, self._failures)
        self._inbox = Inbox(self._axis, self._failures, gpu)
        self._neighbours: Neighbours | None = None
        if self._axis.size > 1:
            self._neighbours = Neighbours(
                self._axis, self._inbox, self._failures, grid.side_groups, gpu=gpu,
                wraps=self.options.chunks > 1, shares=self.options.shares, delay=delay,
            )  # fmt: skip
        self._leader = Leader(grid, self._failures, shares=self.options.shares)
        self._stats = StepStats()

    @property
    def module(self) -> nn.Module:
        """The modules of this rank's stages, with the parameters to be trained."""
        return self._model.module

    @property
    def stats(self) -> StepStats:
        """Statistics of the last `step` on this rank."""
        return self._stats

    def step(
        self,
        micro_batches: Sequence[Any],
        *,
        num_labels: float | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Runs forward and backward of all micro-batches; returns the loss, equal on all ranks.

        Gradients are added to `grad`; `sync_gradients` completes them.

        micro_batches: every rank passes those of its (data, z) group, all of the same shape: a
        MicroBatch each, or (inputs, targets) for a list of modules, where only the first stage
        looks at inputs and the last one at targets. num_labels: the divisor of a transformer's
        loss; default: the number of labels in all micro-batches and ranks. loss_scale: factor of
        all gradients, from the start of backward on; the returned loss does not include it.

        After a failure a pipeline cannot be used again. Collectives: those of the modules; messages
        between stages; all-reduces over all ranks, of the number of micro-batches, of the number of
        labels if num_labels is not given, and of the loss.
        """
        if not torch.is_grad_enabled():
            raise ValueError("Pipeline.step: gradients must be enabled; evaluate needs none")
        return self._run(TRAINING, micro_batches, num_labels, loss_scale)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any], *, num_labels: float | None = None) -> Tensor:
        """Returns the loss of the micro-batches, equal on all ranks, without gradients.

        For modules that behave differently in evaluation, such as Dropout, call `eval()` first.
        """
        return self._run(EVALUATION, micro_batches, num_labels)

    def sync_gradients(self) -> None:
        """Completes all gradients: see axonn_ext.sync_gradients.

        Call it once before each optimizer step, after the last `step` whose gradients are
        accumulated.
        """
        if self.orchestrator is None:
            gradients.sync_gradients(self.module)
        else:
            self.orchestrator.sync_gradients()
            self.orchestrator.settle()

    def forget_shapes(self) -> None:
        """Lets the next micro-batches have other shapes. All ranks call it between steps."""
        if self._neighbours is not None:
            self._neighbours.forget_shapes()

    def close(self) -> None:
        """Ends the message threads. All ranks call it between steps.

        After a failure it does not wait for messages. The groups stay until those of
        torch.distributed are destroyed.
        """
        if self.orchestrator is not None:
            self.orchestrator.close()
        if self._deferring is not None:
            self._deferring.close()
        if self._neighbours is not None:
            if self._failed:
                self._neighbours.abandon()
            else:
                self._neighbours.close()
        self._failed = self._failed or "it is closed"

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._failed = self._failed or f"{kind.__name__}: {error}"
        self.close()

    def _run(
        self,
        phase: str,
        micro_batches: Sequence[Any],
        num_labels: float | None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        if self._failed:
            raise PipelineError(f"this pipeline cannot be used any more: {self._failed}")
        overlaps = self.orchestrator
        run = StepRun(
            self._model, phase=phase, rank=self._axis.rank, inbox=self._inbox,
            neighbours=self._neighbours,
            deferring=self._deferring, deferred_bytes=self.options.deferred_bytes,
            most_deferred=self.options.most_deferred(self._axis.size),
            no_sync=None if overlaps is None else overlaps.no_sync,
            after_task=self._after_task(phase),
            loss_scale=loss_scale,
        )  # fmt: skip
        waited = self._failures.waited_seconds
        decided, telling = self._leader.num_decisions, self._leader.seconds
        try:
            loss = self._run_tasks(phase, run, micro_batches, num_labels, loss_scale)
        except BaseException as error:
            failure = self._failure(run, error)
            if failure is error:
                raise
            raise failure from error
        if phase == TRAINING:
            run.stats.waited_seconds = self._failures.waited_seconds - waited
            run.stats.decisions = self._leader.num_decisions - decided
            run.stats.decision_seconds = self._leader.seconds - telling
            run.stats.shared_bytes = (
                0 if self._neighbours is None else self._neighbours.shared_bytes
            )
            self._stats = run.stats
        return loss

    def _run_tasks(
        self,
        phase: str,
        run: StepRun,
        micro_batches: Sequence[Any],
        num_labels: float | None,
        loss_scale: float,
    ) -> Tensor:
        """Runs a step and returns its loss."""
        count = len(micro_batches)
        forgotten = 0 if self._neighbours is None else self._neighbours.num_forgotten
        table = self._model.table
        trains_table = None if table is None else float(table.requires_grad)
        self._totals.compare(
            {"number of micro-batches": count, "number of calls of forget_shapes": forgotten,
             "loss_scale": loss_scale, "requires_grad of the tied table": trains_table}
        )  # fmt: skip
        if not count:
            raise ValueError("Pipeline: micro_batches must not be empty, got none")
        if not 0 < loss_scale < math.inf:
            raise ValueError(f"Pipeline: loss_scale must be positive and finite, got {loss_scale}")
        orders = [self._order(phase, stage, count) for stage in range(self._axis.size)]
        run.micro_batches = self._model.prepare(micro_batches, num_labels, self._totals)
        if self._neighbours is not None:
            self._neighbours.expect(phase, self._incoming(orders))
        run.run(self._tasks(phase, run, orders[self._axis.rank]))
        if self._neighbours is not None:
            self._neighbours.wait_for_sends()
        run.now = "the sum of the losses"
        if self._pace is not None:
            self._pace.finish()
        # Finished stages wait here for the others, and learn if one of them fails.
        loss = run.loss(self._device)
        return self._totals.sum(loss, {*self._model.loss_axes, "pipe"}, "losses")

    def _after_task(self, phase: str) -> list[Callable[[], None]]:
        """Returns the functions to call after each task, if tasks run as messages arrive."""
        if phase == EVALUATION or self.options.schedule != "message_driven":
            return []
        after = [] if self.orchestrator is None else [self.orchestrator.end_pass]
        return after if self._pace is None else [*after, self._pace.end_task]

    def _order(self, phase: str, stage: int, count: int) -> Sequence[Task]:
        """Returns the tasks of a stage in an order that matches that of its messages.

        For "message_driven" forwards and backwards are each in the order of micro-batches.
        """
        chunks, schedule = self._model.stages.chunks, self.options.schedule
        if phase == EVALUATION:
            # All micro-batches run through the first chunks, then through the second chunks.
            return [Task(FORWARD, chunk, m) for chunk in range(chunks) for m in range(count)]
        if schedule == "message_driven":
            return [Task(kind, 0, m) for kind in (FORWARD, BACKWARD) for m in range(count)]
        return fixed_order(
            schedule, stages=self._axis.size, stage=stage, micro_batches=count, chunks=chunks
        )

    def _tasks(self, phase: str, run: StepRun, order: Sequence[Task]) -> Iterable[Task]:
        if phase == EVALUATION or self.options.schedule != "message_driven":
            return order
        stages, stage = self._axis.size, self._axis.rank
        return MessageDriven(
            stage=stage, stages=stages, micro_batches=len(run.micro_batches),
            in_flight=self.options.most_in_flight(stages, stage), inbox=self._inbox,
            leader=self._leader, deferred=run if self.options.defers else None,
        )  # fmt: skip

    def _incoming(self, orders: Sequence[Sequence[Task]]) -> Iterator[Message]:
        """Yields the messages that both neighbours will send here, in each one's order."""
        last, size = self._model.stages.num_virtual - 1, self._axis.size
        for direction, step in DIRECTIONS.items():
            sender = (self._axis.rank - step) % size
            for task in orders[sender]:
                stage = task.chunk * size + sender + step  # the receiving virtual stage
                if task.kind == direction and 0 <= stage <= last:
                    yield Message(direction, stage, task.micro_batch)

    def _failure(self, run: StepRun, error: BaseException) -> BaseException:
        """Tells all ranks of this rank's failure; returns the most informative error."""
        where, found = f"rank {self.grid.rank}, {run.now}", self._failures.found()
        self._failed = found or f"{where}: {type(error).__name__}: {error}"
        self.grid.side_groups.forget()
        if not found:
            self._failures.tell(self._failed)
        error.add_note(f"in the pipeline: {where}")
        # An op that waited in vain for a peer knows less than the rank that failed first.
        is_wait = isinstance(error, RuntimeError) and not isinstance(error, PipelineError)
        return PipelineError(found) if found and is_wait else error
