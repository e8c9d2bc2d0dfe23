"""Runs one process of a training job, from its checks to its summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store

import axonn_ext
from axonn_ext import settings
from axonn_ext.checkpoint.files import remove
from axonn_ext.data import Corpus, Examples
from axonn_ext.grid import Grid
from axonn_ext.inputs.errors import InputError
from axonn_ext.launch import process
from axonn_ext.launch.bell import Bell
from axonn_ext.launch.place import Process
from axonn_ext.launch.preemption import SIGNALS, Preemption
from axonn_ext.launch.signals import SignalListener
from axonn_ext.models.transformer import Transformer
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.train.checkpoints import AUTO, NOTHING, find_resumed
from axonn_ext.train.claim import claimed
from axonn_ext.train.config import Config
from axonn_ext.train.corpora import load
from axonn_ext.train.export import Origins
from axonn_ext.train.job import Job, prepare
from axonn_ext.train.kernels import settle_kernels
from axonn_ext.train.memory import check_memory
from axonn_ext.train.metrics import MetricsSink
from axonn_ext.train.model import build_model
from axonn_ext.train.run_folder import (
    ADAPTER,
    MODEL,
    check_folder,
    check_inputs,
    folder_of_rank_0,
)
from axonn_ext.train.shared import shared_values
from axonn_ext.train.trainer import Trainer
from axonn_ext.watchdog import summary
from axonn_ext.watchdog.watchdog import Times, Watchdog


@dataclass(frozen=True)
class Run:
    """What a rank needs to train.

    resumed     the checkpoint to go on from
    watchdog    reports what the ranks wait for
    preemption  says after each step whether the run is to save and end; None: it never is
    watching    is closed by all ranks together, once none waits for another any more
    """

    job: Job
    grid: Grid
    corpus: Corpus | Examples
    folder: Path
    resumed: Path | None
    watchdog: Watchdog
    preemption: Preemption | None
    watching: ExitStack
    ranks_of_host: int

    @property
    def needs_warm_up(self) -> bool:
        """Equal on all ranks. One rank has nothing to choose from."""
        return self.job.parallel.algorithm == "auto" and self.job.grid_shape.size > 1

    def make_trainer(
        self, *, sinks: Sequence[MetricsSink] = (), profile: Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Trainer:  # fmt: skip
        """Returns the trainer of this rank; only rank 0 has sinks, a profile and a voice."""
        model = build_model(self.job, self.grid)
        if model.orchestrator is not None:
            self.watchdog.orchestrators = (model.orchestrator,)
        return Trainer(
            self.job, self.grid, model=model, corpus=self.corpus, folder=self.folder,
            stop=self._after_step, sinks=sinks, profile=profile, say=say,
        )  # fmt: skip

    def _after_step(self, step: int) -> bool:
        self.watchdog.step_ended()
        return self.preemption is not None and self.preemption.due(step)

    def save(self, trainer: Trainer) -> Path | None:
        """Writes a model that began as a pretrained one; returns the folder. All ranks call it.

        Raises TrainingError if that fails.
        """
        model, lora = trainer.module, self.job.config.lora.rank > 0
        base = self.job.config.model.pretrained
        if not base or not isinstance(model, Transformer):
            return None
        folder = self.folder / (ADAPTER if lora else MODEL)
        fresh = folder.with_name(f".{folder.name}.new")
        if self.grid.rank == 0:
            remove(fresh)
        try:
            if lora:
                axonn_ext.save_adapter(model, fresh, base=str(Path(base).resolve()))
            else:
                tokenizer = Origins.of(self.job).tokenizer or None
                axonn_ext.save_pretrained(model, fresh, like=base, tokenizer=tokenizer)
            if self.grid.rank == 0:  # a run that this one goes on with may have written one
                remove(folder)
                fresh.rename(folder)
        except (InputError, OSError) as error:
            raise TrainingError(str(error)) from None
        return folder


@contextmanager
def _watched(bell: Bell, watchdog: Watchdog, preemption: Preemption | None) -> Iterator[None]:
    """Listens to signals and watches for hangs. All ranks must leave it together."""
    hears = {summary.SIGNAL: watchdog.hear}
    if preemption is not None:
        hears |= dict.fromkeys(SIGNALS, preemption.hear)
    with bell, watchdog, preemption or nullcontext(), SignalListener(hears):
        yield


def run_worker(
    config: Config, here: Process, *, folder: Path, overwrite: bool, profile: bool = False,
    note: str = "", store: Store | None = None,
) -> None:  # fmt: skip
    """Trains as one process of the job; rank 0 writes `folder` and shows the progress.

    profile: rank 0 also writes a Chrome trace of a few steps. note: a line that rank 0 shows above
    all else. store: where one is open already. If checkpoints are saved, SIGTERM and SIGUSR1 save
    one more and end the run. SIGUSR2 makes all ranks report what they wait for.

    Raises: UserError for a mistake of the user, found here or on another rank; TrainingError.
    """
    free: Callable[[], None] = _nothing
    with ExitStack() as stack:
        with process.checking(here, store):
            check_inputs(config, folder)
            if here.rank == 0:
                launch = settings.launch_environment()
                if launch is None or not launch.by_us:  # else the launcher has claimed it
                    free = stack.enter_context(claimed(folder))
                check_folder(folder, overwrite=overwrite, resumes=config.checkpoint.resume == AUTO)
            job = prepare(
                config, world_size=here.world_size, local_world_size=here.local_world_size
            )
            check_memory(job, ranks_here=here.local_world_size)
            corpus = load(job)
        store = store or process.open_store(here)
        process.meet(store, here, lambda: shared_values(job, corpus))
        _run_worker(job, corpus, here, store, folder, profile=profile, note=note, free=free)


def _run_worker(
    job: Job, corpus: Corpus | Examples, here: Process, store: Store, folder: Path, *,
    profile: bool, note: str, free: Callable[[], None],
) -> None:  # fmt: skip
    def end_process(status: int) -> None:
        free()
        os._exit(status)

    config = job.config
    locked = settle_kernels(job, store, here, say=_tell)
    folder = folder_of_rank_0(store, here, folder)
    found = process.settled_by_rank_0(
        store, here, lambda: find_resumed(config, folder), topic="checkpoint"
    )
    resumed = None if found == NOTHING else Path(found)
    threads = process.set_threads(here, config.train.threads)
    bell, preemption = Bell(store, here), None
    if config.checkpoint.interval:
        voice = _tell if here.rank == 0 else None
        preemption = Preemption(store, here, bell=bell, say=voice, end_process=end_process)
    watch = Watchdog(
        bell, here, folder, say=lambda line: _tell(f"watchdog: {line}"),
        times=Times.before(settings.load().timeout_seconds),
    )  # fmt: skip
    # Before anything waits for peers in other ways than at the store, such as the making of groups.
    with ExitStack() as watching:
        watching.enter_context(_watched(bell, watch, preemption))
        with process.process_group(here, store, job.device):
            grid = Grid(**job.grid_shape.as_dict())
            run = Run(
                job, grid, corpus, folder, resumed, watch, preemption, watching,
                ranks_of_host=here.local_world_size,
            )  # fmt: skip
            if here.rank == 0:
                from axonn_ext.train.first_rank import train_and_show  # loads rich

                train_and_show(run, threads=threads, profile=profile, notes=[note, locked])
            else:
                _train(run)
            grid.communicators.close()


def _tell(line: str) -> None:
    """Prints a line. Most ranks have none to print, and do not load rich for it."""
    from axonn_ext.terminal.console import Console, say

    say(Console(), line)


def _nothing() -> None:
    """Frees a folder that this process has not claimed."""


def _train(run: Run) -> None:
    trainer = run.make_trainer()
    if run.resumed is not None:
        trainer.resume(run.resumed)
    if not trainer.is_done:
        if run.needs_warm_up:
            trainer.warm_up()
        trainer.run()
    if trainer.is_done:
        run.save(trainer)
    run.watching.close()
