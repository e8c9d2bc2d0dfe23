"""Runs one process of a training job, from its checks to its summary."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.bell import Bell
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.preemption import SIGNALS, Preemption
from axonn_ext.ranks.launch.signals import SignalListener
from axonn_ext.spec import settings
from axonn_ext.train.batches import make_batches, row_group
from axonn_ext.train.claim import claimed
from axonn_ext.train.config import AUTO, Config
from axonn_ext.train.corpora import load
from axonn_ext.train.differences import shared_values
from axonn_ext.train.export import save_trained
from axonn_ext.train.job import check_memory, prepare
from axonn_ext.train.model import build_model
from axonn_ext.train.run import Audience, Run, settle, tell
from axonn_ext.train.run_folder import check_folder, check_inputs
from axonn_ext.train.trainer import Trainer, make_optimizer
from axonn_ext.train.watchdog import summary
from axonn_ext.train.watchdog.watchdog import Times, Watchdog


@dataclass(frozen=True)
class _Watch:
    """The listeners while a rank trains.

    watchdog     reports what the ranks wait for
    preemption   decides after each step whether to save and end the run; None: never
    """

    watchdog: Watchdog
    preemption: Preemption | None

    def after_step(self, step: int) -> bool:
        """Returns whether to save and end the run, the same on all ranks."""
        self.watchdog.step_ended()
        return self.preemption is not None and self.preemption.due(step)


def run_worker(
    config: Config, here: Process, *, folder: Path, overwrite: bool, profile: bool = False,
    note: str = "", store: Store | None = None,
) -> None:  # fmt: skip
    """Trains as one process of the job; rank 0 writes `folder` and shows the progress.

    profile: rank 0 also writes a Chrome trace of a few steps. note: a line that rank 0 shows first.
    store: an already open store, if any. If checkpoints are saved, SIGTERM, SIGUSR1 and the first
    SIGINT save one more and end the run. SIGUSR2 makes all ranks report what they wait for.

    Raises: UserError for a user's mistake found here or on another rank; TrainingError; without a
    launcher, KeyboardInterrupt after SIGINT, with a message if a checkpoint was saved.
    """
    with ExitStack() as stack:
        with process.checking(here, store):
            check_inputs(config, folder)
            free = stack.enter_context(_claimed_by_rank_0(folder, here))
            if here.rank == 0:
                check_folder(folder, overwrite=overwrite, resumes=config.checkpoint.resume == AUTO)
                if config.metrics.names:
                    from axonn_ext.train.sinks import check_sinks

                    check_sinks(config)
            job = prepare(
                config, world_size=here.world_size, local_world_size=here.local_world_size
            )
            check_memory(job, ranks_here=here.local_world_size)
            corpus = load(config, job.text, job.model.vocab_size, reads_stream=here.rank == 0)
        store = store or process.open_store(here)
        process.meet(store, here, lambda: shared_values(job, corpus))
        run = settle(job, corpus, here, store, folder, note=note)
        # Entered before anything waits for peers outside the store, such as the creation of
        # groups. All ranks leave the watch together, once none waits for another any more.
        with ExitStack() as watching:
            watch = watching.enter_context(_watched(run, store, free))
            with process.process_group(here, store, job.device):
                _train(run, watch, watching.close, profile=profile)
        interrupted = watch.preemption is not None and watch.preemption.is_interrupt
        if interrupted and settings.launch_environment() is None:
            raise KeyboardInterrupt("interrupted")


@contextmanager
def _claimed_by_rank_0(folder: Path, here: Process) -> Iterator[Callable[[], None]]:
    """Claims the folder on rank 0, unless the launcher has; yields a function that frees it."""
    launch = settings.launch_environment()
    if here.rank == 0 and (launch is None or not launch.by_us):
        with claimed(folder) as free:
            yield free
    else:
        yield lambda: None


@contextmanager
def _watched(run: Run, store: Store, free: Callable[[], None]) -> Iterator[_Watch]:
    """Listens to signals and watches for hangs. All ranks must leave it together."""
    here = run.here

    def end_process(status: int) -> None:
        free()
        os._exit(status)

    bell, preemption = Bell(store, here), None
    if run.job.config.checkpoint.interval:
        voice = tell if here.rank == 0 else None
        preemption = Preemption(store, here, bell=bell, say=voice, end_process=end_process)
    watchdog = Watchdog(
        bell, here, run.folder, say=lambda line: tell(f"watchdog: {line}"),
        times=Times.before(settings.load().timeout_seconds),
    )  # fmt: skip
    hears = {summary.SIGNAL: watchdog.hear}
    if preemption is not None:
        hears |= dict.fromkeys(SIGNALS, preemption.hear)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script
            del hears[signal.SIGINT]
    with bell, watchdog, preemption or nullcontext(), SignalListener(hears):
        yield _Watch(watchdog, preemption)


def _train(run: Run, watch: _Watch, stop_watching: Callable[[], None], *, profile: bool) -> None:
    """Trains in the job's process group: creates the grid and runs the steps."""
    job, config = run.job, run.job.config
    grid = Grid(**config.grid.as_dict())
    training, evaluation = make_batches(config, run.corpus, row_group(grid))
    model = build_model(job, grid)
    if model.orchestrator is not None:
        watch.watchdog.orchestrators = (model.orchestrator,)
    optimizer = make_optimizer(model.module, config.optim)
    audience = _audience_of(run, profile=profile)
    trainer = Trainer(
        job, grid, training=training, evaluation=evaluation, model=model, optimizer=optimizer,
        folder=run.folder, stop=watch.after_step, profile=audience.profile, say=audience.say,
    )  # fmt: skip
    audience.begins()
    _take_steps(run, trainer, grid, audience)
    saved = None
    if trainer.is_done:
        with optimizer.averaged():
            saved = save_trained(job, model.module, run.folder, rank=grid.rank)
    stop_watching()
    audience.ended(trainer, saved)
    grid.communicators.close()


def _audience_of(run: Run, *, profile: bool) -> Audience:
    """Returns the audience of the run on this rank."""
    if run.here.rank != 0:
        return Audience()
    from axonn_ext.train.first_rank import User  # loads rich

    return User(run, profile=profile)


def _take_steps(run: Run, trainer: Trainer, grid: Grid, audience: Audience) -> None:
    """Runs the remaining steps, if any."""
    if run.resumed is not None:
        audience.resumed(run.resumed, trainer.resume(run.resumed))
    if trainer.is_done:
        audience.nothing_left(trainer.why_done)
        return
    audience.starts()
    config = run.job.config
    if config.train.compile:
        audience.compiles()
    # One rank has no algorithm to choose.
    if config.train.compile or (config.parallel.algorithm == AUTO and grid.world_size > 1):
        began = time.perf_counter()
        num_measured = trainer.warm_up()
        audience.warmed_up(num_measured, time.perf_counter() - began)
    with audience.steps(trainer) as sinks:
        trainer.run(sinks)
