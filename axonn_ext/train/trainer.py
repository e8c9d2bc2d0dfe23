"""The training loop."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

import axonn_ext
from axonn_ext.checkpoint import CheckpointError
from axonn_ext.data import Batch, Batches, Evaluation
from axonn_ext.models.transformer import Transformer
from axonn_ext.optim import AdamW, LossScaler, Schedule
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import of_first_rank
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.train.batches import count_labels, reading
from axonn_ext.train.checkpoints import Resumed, RunCheckpoints
from axonn_ext.train.config import Config, OptimTable
from axonn_ext.train.exposure import Exposure
from axonn_ext.train.job import Job
from axonn_ext.train.metrics import EvaluationMetrics, MetricsSink, Sample, StepMetrics
from axonn_ext.train.model import TrainedModel
from axonn_ext.train.nonfinite import NonFinite
from axonn_ext.train.slow_ranks import SlowRanks

if TYPE_CHECKING:
    from axonn_ext.data.stream_batches import StreamBatches
    from axonn_ext.train.early_stop import EarlyStop


@dataclass(frozen=True)
class Gradients:
    """The results of a step's forward and backward passes besides the gradients themselves.

    factor: clips and unscales the gradients. dropped: the share of the labels left out by Goldfish
    loss.
    """

    loss: float
    norm: float
    factor: float
    loss_scale: float
    dropped: float


class Trainer:
    """Trains a model on a job's text. All ranks run it.

    training    this rank's share of the batches; evaluation: likewise for held-out text, if any
    folder      of the run, where its checkpoints are
    stop        called after each step: whether to save and end the run; equal on all ranks
    say         shows a line to the user, on rank 0
    """

    def __init__(
        self,
        job: Job,
        grid: Grid,
        *,
        training: Batches,
        evaluation: Evaluation | None,
        model: TrainedModel,
        optimizer: AdamW,
        folder: Path,
        stop: Callable[[int], bool] | None = None,
        profile: Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        config = job.config
        self._config, self._device, self._grid = config, job.device, grid
        self._rates, self._stop, self._samples = job.rates, stop, job.samples
        self._training, self._evaluation = training, evaluation
        self._model, self._optimizer = model, optimizer
        self._sinks: Sequence[MetricsSink] = ()
        self._schedule = make_schedule(config.optim, config.train.steps)
        self._scaler = job.loss_scaler()
        self._early_stop = _early_stop(config)
        self._checkpoints = RunCheckpoints(
            job, folder, module=model.module, optimizer=optimizer, scaler=self._scaler,
            early_stop=self._early_stop, say=say,
            stream=cast("StreamBatches", training) if config.is_stream else None,
        )  # fmt: skip
        self._done = 0  # number of steps
        self._first_step_done = (0, 0.0)  # number and end time of this process's first step
        self._nonfinite = NonFinite(config, model.module, say, self._scaler, grid)
        self._make_exposure = partial(
            Exposure, grid, model.orchestrator, profile=profile, device=job.device,
            waited_for_messages=lambda: model.waited_seconds,
        )  # fmt: skip
        self.exposure = self._make_exposure(num_steps=config.train.steps)
        self._slow_ranks = SlowRanks(grid, device=job.device, say=say)

    def warm_up(self) -> int:
        """Compiles blocks and measures algorithms for "auto"; returns the number of measured calls.

        It runs one forward and backward pass over the first micro-batch and drops the results; to
        compile, also an evaluation of it. The steps themselves compile and measure nothing.
        """
        with reading(self._config):
            batch = self._training.micro_batch(self._done, 0)
        with axonn_ext.warm_up():
            self._model.warm_up(batch)
            if self._config.train.compile and self._evaluation is not None:
                self._model.evaluate([batch], 1.0)
        self._optimizer.zero_grad()
        if self._model.orchestrator is not None:
            self._model.orchestrator.end_step()
        return sum(choice.source == "measured" for choice in axonn_ext.tuning.choices())

    def resume(self, checkpoint: Path) -> Resumed:
        """Resumes from a checkpoint; returns a description of the run that wrote it.

        Raises UserError if it is damaged or belongs to another model.
        """
        resumed = self._checkpoints.resume(checkpoint)
        self._done, self._training.shift = resumed.step, resumed.shift
        left = max(1, self._config.train.steps - self._done)
        self.exposure = self._make_exposure(num_steps=left)
        return resumed

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped because a loss or gradient was not finite."""
        return self._nonfinite.num_skipped

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of a run in fp16."""
        return self._scaler

    @property
    def is_done(self) -> bool:
        """Whether no steps are left, or the run has stopped early."""
        return self._done >= self._config.train.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether the run ends before its last step, as the evaluations no longer improve."""
        is_due = self._early_stop is not None and self._early_stop.is_due
        return is_due and self._done < self._config.train.steps

    @property
    def why_done(self) -> str:
        """The reason for the end of the run."""
        if self._early_stop is not None and self.stopped_early:
            return self._early_stop.describe()
        return f"train.steps is {self._config.train.steps:,}"

    @property
    def steps_done(self) -> int:
        """Number of steps done, including those before a resumed checkpoint."""
        return self._done

    def run(self, sinks: Sequence[MetricsSink] = ()) -> None:
        """Runs the remaining steps, and waits until the last checkpoint is on disk.

        sinks: receive the metrics; only on rank 0.

        Raises TrainingError if a loss or gradient is not finite (see NonFinite), or if the last
        checkpoint cannot be written.
        """
        self._sinks = sinks
        try:
            self._run()
            self._checkpoints.close()
        except CheckpointError as error:
            raise TrainingError(f"the last checkpoint was not written: {error}") from None
        except KeyboardInterrupt:
            raise  # at once, without the save that is under way
        except BaseException:
            self._checkpoints.close_after_failure()
            raise

    def _run(self) -> None:
        train = self._config.train
        if not self._done:
            self._evaluate(0)
        first = self._done
        for step in range(first, train.steps):
            began, waited = time.perf_counter(), self.exposure.waited()
            with self.exposure.step(step - first + 1):
                gradients = self._forward_backward(step)
                lr = self._schedule(step)
                if self._nonfinite.is_fine(step + 1, gradients.loss, gradients.norm):
                    with self.exposure.span("optimizer"):
                        self._optimizer.step(lr, gradient_factor=gradients.factor)
            seconds = time.perf_counter() - began
            self._slow_ranks.step(seconds, self.exposure.waited() - waited)
            overflowed = self._scaler is not None and not math.isfinite(gradients.norm)
            if math.isfinite(gradients.loss) and (overflowed or math.isfinite(gradients.norm)):
                self._report(step + 1, gradients, lr, seconds)
            self._done = done = step + 1
            stops = self._stop is not None and self._stop(done)
            due = train.eval_interval and (done % train.eval_interval == 0 or done == train.steps)
            if due and (not stops or self._early_stop is not None):
                self._evaluate(done)
            ends = stops or self.is_done
            self._checkpoints.after_step(done, last=ends)
            if ends:
                break

    def _forward_backward(self, step: int) -> Gradients:
        """Computes the gradients of one global batch; returns their norm and scale factor."""
        self._optimizer.zero_grad()
        with self.exposure.span("read the batch"), reading(self._config):
            indices = range(self._training.num_micro_batches)
            batches = [self._training.micro_batch(step, index) for index in indices]
        num_labels, dropped = self._num_labels(step, batches)
        scale = 1.0 if self._scaler is None else self._scaler.loss_scale
        loss = self._model.forward_backward(
            batches, num_labels, self.exposure.span, loss_scale=scale
        )
        with self.exposure.span("sum gradients"):
            found = self._model.finish_gradients(self._config.optim.clip_norm, loss_scale=scale)
            return Gradients(loss, float(found.norm), float(found.factor), scale, dropped)

    def _num_labels(self, step: int, batches: Sequence[Batch]) -> tuple[float, float]:
        """Returns the divisor of a global batch's loss, and the share of its labels dropped.

        The loss of a batch without labels is 0 / 1, which trains nothing.
        """
        labels = max(1.0, self._training.num_labels(step))
        if not self._config.goldfish.k:
            return labels, 0.0
        kept = count_labels(batches, self._grid, device=self._device)
        return max(1.0, kept), 1 - kept / labels

    def _evaluate(self, step: int) -> None:
        """Reports the mean loss over the fixed batches of held-out text, of the averaged weights,
        and what they generate after the prompts of train.samples.

        Collectives, with early stopping: two broadcasts of rank 0's loss.
        """
        batches = self._evaluation
        if batches is None:
            return
        with reading(self._config):
            read = [batches.batch(index) for index in range(batches.num_batches)]
        with self._optimizer.averaged():
            total = self._model.evaluate(read, batches.num_labels)
            samples: tuple[Sample, ...] = ()
            if self._samples is not None:
                assert isinstance(self._model.module, Transformer)
                samples = self._samples.continued(self._model.module)
        if self._early_stop is not None:
            agreed = of_first_rank(total) if self._grid.world_size > 1 else total
            self._early_stop.saw(step, agreed)
        tokens = self._tokens(step)
        for sink in self._sinks:
            sink.evaluation(EvaluationMetrics(step, tokens, total, samples))

    def _tokens(self, step: int) -> int:
        """Returns the number of tokens of all steps up to this one, whatever their batch sizes."""
        shift = self._training.shift * self._config.model.sequence_length
        return step * self._training.tokens_per_step + shift

    def _report(self, step: int, gradients: Gradients, lr: float, seconds: float) -> None:
        if not self._sinks:
            return
        now, tokens = time.perf_counter(), self._training.tokens_per_step
        first, then = self._first_step_done
        if not first:  # the first step includes one-time work
            self._first_step_done = first, then = step, now
        step_seconds = (now - then) / (step - first) if step > first else seconds
        speed = self._rates.speed(tokens / seconds)
        metrics = StepMetrics(
            step=step,
            loss=gradients.loss,
            grad_norm=gradients.norm if math.isfinite(gradients.norm) else None,
            lr=lr,
            tokens=self._tokens(step),
            tokens_per_s=tokens / seconds,
            tflops=speed.tflops,
            memory_bytes=peak_memory_bytes(),
            eta_s=step_seconds * (self._config.train.steps - step),
            loss_scale=gradients.loss_scale,
            skipped_steps=0 if self._scaler is None else self._scaler.num_overflows,
            dropped=gradients.dropped,
            hardware_tflops=speed.hardware_tflops,
            peak_fraction=speed.peak_fraction,
            whole_peak_fraction=speed.whole_peak_fraction,
            memory_fraction=memory_fraction(),
        )
        for sink in self._sinks:
            sink.step(metrics)


def _early_stop(config: Config) -> EarlyStop | None:
    """Returns a new early stop, if one is configured."""
    train = config.train
    if not train.early_stop_patience:
        return None
    from axonn_ext.train.early_stop import EarlyStop  # most runs do not need it

    return EarlyStop(train.early_stop_patience, train.early_stop_min_delta)


def make_schedule(optim: OptimTable, steps: int) -> Schedule:
    """Returns the configured learning rate of a run of that many steps."""
    fraction = optim.warmup_fraction
    return Schedule(
        peak=optim.lr, final=optim.lr * optim.final_lr_fraction,
        warmup_steps=round(fraction * steps) if fraction else optim.warmup_steps,
        total_steps=steps, shape=optim.schedule, decay_type=optim.decay_type,
        decay_steps=round(optim.decay_fraction * steps),
    )  # fmt: skip


def make_optimizer(module: nn.Module, optim: OptimTable) -> AdamW:
    """Returns the configured optimizer."""
    common: dict[str, Any] = {
        "lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps,
        "weight_decay": optim.weight_decay, "groups": optim.groups, "zero": optim.zero,
        "bucket_elements": optim.bucket_elements, "ema_decay": optim.ema_decay,
    }  # fmt: skip
    if not optim.is_muon:
        folder = optim.offload_folder or None
        return AdamW(module, offload=optim.offload, folder=folder, **common)
    from axonn_ext.optim.muon import Muon  # imported here, as most runs use AdamW

    assert isinstance(module, Transformer)
    return Muon(
        module, matrices=module.hidden_matrices(), momentum=optim.momentum,
        adjust_lr=optim.adjust_lr, algorithm=module.parallel.algorithm, **common,
    )  # fmt: skip


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process: on its GPU if it uses one, else resident memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_fraction() -> float | None:
    """Returns the share of the GPU's memory that torch allocated at most; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return torch.cuda.max_memory_allocated() / total
