"""Lets a job that is told to end save what it has: all ranks end after the same step.

Slurm sends SIGTERM, or a signal that the user chose, before it takes a job's machines away.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch.distributed import Store

from axonn_ext.launch.place import Process

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AGREE_SECONDS = 2.0  # within which all ranks must answer
SAVE_SECONDS = 20.0  # within which the process must have ended, from the signal on
_POLL_SECONDS = 0.25
_ASKED, _LAST_STEP = "end/asked", "end/last_step"


class Preemption:
    """Answers the SIGNALS while it is entered, which all ranks must do.

    `hear` tells it of a signal of this rank; its thread learns of those of other ranks. If all
    ranks answer within AGREE_SECONDS, `due` returns True on all of them after the same step. If one
    does not, or if the process is still there SAVE_SECONDS later, the thread ends the process at
    once, with status 1: its main thread may wait for a peer that will never come.

    say: shows a line to the user, on rank 0.
    """

    def __init__(
        self,
        store: Store,
        process: Process,
        *,
        say: Callable[[str], None] | None = None,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._store, self._process = store, process
        # A store waits for one call after the other, so that the thread has one of its own.
        self._own_store: Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
        self._say, self._end_process = say, end_process
        self._alive = [f"end/alive/{rank}" for rank in range(process.world_size)]
        self._ready, self._left = threading.Event(), threading.Event()
        self._published = False
        self._heard: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)

    def __enter__(self) -> Preemption:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._left.set()
        self._heard.put(None)
        self._thread.join()

    def hear(self, number: signal.Signals) -> None:
        """Tells it, from any thread, that this rank got one of the SIGNALS."""
        self._heard.put(number)

    def due(self, step: int) -> bool:
        """Returns whether the job is to end after this step; the same on all ranks.

        All ranks must call it after each step, and no rank may end a step that another rank has
        not begun. Rank 0 names the step after the one that it has ended: no other rank has ended
        that, so that all read the name in time.
        """
        if self._process.rank == 0 and self._ready.is_set() and not self._published:
            last = step + 1 if self._process.world_size > 1 else step
            self._store.set(_LAST_STEP, str(last))
            self._published = True
        return self._store.check([_LAST_STEP]) and step >= int(self._store.get(_LAST_STEP))

    def _watch(self) -> None:
        asked = False
        try:
            while not self._left.is_set():
                with suppress(queue.Empty):
                    number = self._heard.get(timeout=_POLL_SECONDS)
                    if number is not None:
                        asked = True
                        self._own_store.set(_ASKED, number.name)
                if self._own_store.check([_ASKED]):
                    asked = True
                    self._end()
                    return
        except Exception as error:  # the store is gone: peers may be, too
            if asked:
                self._stop_at_once(f"cannot agree with the other ranks: {error}")

    def _end(self) -> None:
        began = time.monotonic()
        name = self._own_store.get(_ASKED).decode()
        self._own_store.set(self._alive[self._process.rank], "")
        while not self._own_store.check(self._alive):
            if self._left.is_set():
                return  # the run ended by itself
            if time.monotonic() - began > AGREE_SECONDS:
                self._stop_at_once(f"{name}: not all ranks answer; nothing is saved")
                return
            time.sleep(0.02)
        self._ready.set()
        self._tell(f"{name}: saving after the step that is under way")
        if not self._left.wait(SAVE_SECONDS - (time.monotonic() - began)):
            self._stop_at_once(
                f"{name}: no step ended and was saved within {SAVE_SECONDS:g} s; the checkpoints "
                "before are as they were"
            )

    def _stop_at_once(self, why: str) -> None:
        self._tell(why)
        self._end_process(1)

    def _tell(self, line: str) -> None:
        if self._say is not None:
            with suppress(OSError):  # nobody reads it
                self._say(line)
