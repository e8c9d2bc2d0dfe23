"""The agreement of a job's ranks before they train, and the interface that reports progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import Store

from axonn_ext.data import Corpus, Examples
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.train.checkpoints import Resumed, find_resumed
from axonn_ext.train.job import Job
from axonn_ext.train.kernels import settle_kernels
from axonn_ext.train.metrics import MetricsSink
from axonn_ext.train.run_folder import folder_of_rank_0
from axonn_ext.train.trainer import Trainer

if TYPE_CHECKING:
    from axonn_ext.data.stream_batches import Stream


@dataclass(frozen=True)
class Run:
    """A job and its text on one rank, and the values that this rank has settled with the others.

    folder    where rank 0 writes
    resumed   the checkpoint to resume from
    threads   number of CPU threads of this rank
    notes     lines that rank 0 shows first; some may be empty
    """

    here: Process
    job: Job
    corpus: Corpus | Examples | Stream
    folder: Path
    resumed: Path | None
    threads: int
    notes: tuple[str, ...]


def settle(
    job: Job,
    corpus: Corpus | Examples | Stream,
    here: Process,
    store: Store,
    folder: Path,
    *,
    note: str,
) -> Run:
    """Settles with the other ranks the rest of a run besides the job; all ranks call it together.

    Raises: UserError for a user's mistake found here or on rank 0.
    """
    locked = settle_kernels(job, store, here, say=tell)
    folder = folder_of_rank_0(store, here, folder)
    found = process.settled_by_rank_0(
        store, here, lambda: find_resumed(job.config, folder), topic="checkpoint"
    )
    threads = process.set_threads(here, job.config.train.threads)
    return Run(here, job, corpus, folder, Path(found) if found else None, threads, (note, locked))


class Audience:
    """Receives the progress of a run, in the order of these methods; on rank 0 shows the user.

    profile: path for a Chrome trace of a few steps. say: shows a line.
    """

    profile: Path | None = None
    say: Callable[[str], None] | None = None

    def begins(self) -> None:
        """Setup is complete."""

    def resumed(self, path: Path, resumed: Resumed) -> None:
        """The run resumes from a checkpoint."""

    def starts(self) -> None:
        """Steps are left, and the checkpoint, if any, is loaded: the run may change its folder."""

    def nothing_left(self, why: str) -> None:
        """The run has no steps left."""

    def compiles(self) -> None:
        """The warm-up will compile the blocks."""

    def warmed_up(self, num_measured: int, seconds: float) -> None:
        """The warm-up has ended, and measured the algorithms of `num_measured` calls."""

    def steps(self, trainer: Trainer) -> AbstractContextManager[Sequence[MetricsSink]]:
        """Wraps the steps; yields the sinks for their metrics."""
        return nullcontext(())

    def ended(self, trainer: Trainer, saved: Path | None) -> None:
        """No rank waits for another any more. saved: path of the written model, if any."""


def tell(line: str) -> None:
    """Prints a line; loads rich only then, since most ranks print nothing."""
    from axonn_ext.terminal.console import Console, say

    say(Console(), line)
