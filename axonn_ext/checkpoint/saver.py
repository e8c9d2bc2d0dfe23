"""Saves the checkpoints of a run in the background of its next steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from torch import nn

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.folder import CheckpointFolder
from axonn_ext.checkpoint.ranks import Ranks
from axonn_ext.checkpoint.save import write
from axonn_ext.checkpoint.staging import Snapshot, Staging
from axonn_ext.checkpoint.state import Optimizer


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk. seconds: from the start of the copy to the end of writing."""

    step: int
    path: Path
    num_bytes: int
    seconds: float


class Saver:
    """Writes checkpoints of a run to `root`, at most one at a time, and removes old ones.

    A save copies the blocks that this rank writes to host memory and returns; a thread writes the
    copy. The next save first waits for the one before. All ranks must make and call their savers in
    the same way.

    on_saved: called on rank 0, in the thread, when a checkpoint is on disk.

    Collectives: none; the ranks' threads agree through the store, each with its own connection.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        background: bool = True,
        on_saved: Callable[[Saved], None] | None = None,
    ) -> None:
        self.folder = CheckpointFolder(root)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._background, self._on_saved = background, on_saved
        self.ranks = Ranks.of_world()
        self._staging = Staging()
        self._writing: Future[None] | None = None

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to save. First waits for the save before, and raises its errors, like `wait`.

        A value that cannot be saved is found here, but its error comes with this save's others, on
        every rank.
        """
        self.wait()
        began = time.perf_counter()
        snapshot: Snapshot | CheckpointError
        try:
            snapshot = self._staging.take(
                model=model, optimizer=optimizer, extra=extra,
                facts={"step": step, **(facts or {})},
            )  # fmt: skip
        except CheckpointError as error:
            snapshot = error
        self._writing = Future()
        # A daemon: a process that has failed can end even if a peer never writes its part.
        Thread(
            target=self._run, args=(self._writing, step, snapshot, began), name="checkpoint",
            daemon=True,
        ).start()  # fmt: skip
        if not self._background:
            self.wait()

    def _run(
        self, done: Future[None], step: int, snapshot: Snapshot | CheckpointError, began: float
    ) -> None:
        self.ranks.begin()
        try:
            failed = isinstance(snapshot, CheckpointError)
            self.ranks.agree(str(snapshot) if failed else None)
            assert isinstance(snapshot, Snapshot)
            self._write(step, snapshot, began)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _write(self, step: int, snapshot: Snapshot, began: float) -> None:
        path = self.folder.path(step)
        # A run resumed from an earlier step passes steps that already have a checkpoint.
        self.ranks.told(self.folder.recover)
        num_bytes = write(path, snapshot, self.ranks, replaces=True)
        self.ranks.told(lambda: self._publish(step))
        if self._on_saved is not None and self.ranks.rank == 0:
            self._on_saved(Saved(step, path, num_bytes, time.perf_counter() - began))

    def _publish(self, step: int) -> None:
        self.folder.mark_latest(step)
        self.folder.prune(
            step, keep_last=self._keep_last, keep_every=self._keep_every, beat=self.ranks.beat
        )

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the save under way, at most `seconds`.

        Raises CheckpointError on every rank if the save failed on one; earlier checkpoints are
        untouched. Raises TimeoutError if the time is up.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result(seconds)
