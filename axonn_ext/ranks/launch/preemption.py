"""Lets a job save a checkpoint when a signal asks it to end: all ranks stop after the same step.

Slurm sends SIGTERM, or a signal that the user chose, before it takes a job's machines away; Ctrl-C
sends SIGINT.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed import Store

from axonn_ext.ranks.launch.bell import Bell, Ring
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.meeting import name_ranks
from axonn_ext.ranks.stores import absent, comes

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AGREE_SECONDS = 2.0  # all ranks must answer within this time, plus
AGREE_SECONDS_PER_RANK = 2e-4  # three times what the store needs to serve one rank (calculated)
SAVE_SECONDS = 20.0  # the process must have ended this long after the signal
AGAIN_SECONDS = 3.0  # and this long after a second SIGINT
_TOPIC = "end"
_ANSWERS, _AGREED, _LAST_STEP = "end/answers", "end/agreed", "end/last_step"
_YES, _NO = "yes", "no"


class Preemption:
    """Answers the SIGNALS. All ranks must enter it as a context, inside the bell.

    `hear` passes it a signal of this rank; the bell, those of other ranks. If all ranks answer in
    time, `due` returns True on all of them after the same step. If one does not, or if the process
    is still running SAVE_SECONDS later, it ends the process at once, with status 1, whatever the
    main thread and the store do: they may wait for a peer that will never come. After SIGINT, the
    status is 130, and the step has all the time that it needs, until another signal comes: after a
    second SIGINT, AGAIN_SECONDS are left, since the main thread may not notice it, and after one of
    the others, SAVE_SECONDS.

    store: that of the main thread. say: shows a line to the user, on rank 0.
    """

    def __init__(
        self,
        store: Store,
        process: Process,
        *,
        bell: Bell,
        say: Callable[[str], None] | None = None,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._store, self._process, self._bell = store, process, bell
        self._say, self._end_process = say, end_process
        self._answered, self._ready = threading.Event(), threading.Event()
        self._left = threading.Event()
        self._published = False
        self._lock = threading.Lock()
        self._heard = ""  # the name of the first signal
        self._interrupts = 0  # SIGINTs of this rank
        self._timer: threading.Timer | None = None
        bell.hears(_TOPIC, self._answer)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        with self._lock:
            self._left.set()
            if self._timer is not None:
                self._timer.cancel()

    def hear(self, number: signal.Signals) -> None:
        """Notes, from any thread, that this rank got one of the SIGNALS."""
        is_first = self._starts(number.name)
        self._interrupts += number == signal.SIGINT
        if not is_first:
            if self.is_interrupt and (number != signal.SIGINT or self._interrupts > 1):
                self._hurry(AGAIN_SECONDS if number == signal.SIGINT else SAVE_SECONDS, number.name)
            return
        try:
            self._bell.ring(_TOPIC, number.name)
        except RuntimeError as error:  # the store is gone: peers may be, too
            self._stop_at_once(f"cannot agree with the other ranks: {error}")

    @property
    def is_interrupt(self) -> bool:
        """Whether the job was told to end by SIGINT."""
        return self._heard == signal.SIGINT.name

    def due(self, step: int) -> bool:
        """Returns whether the job must end after this step; the same on all ranks.

        All ranks must call it after each step, and no rank may end a step that another rank has
        not begun. Once all ranks have answered, rank 0 chooses the step after the one that it has
        ended: no other rank has ended that one, so all read the choice in time. A rank does not use
        the store here before it has answered.
        """
        if not self._answered.is_set():
            return False
        if self._process.rank == 0 and self._ready.is_set() and not self._published:
            last = step + 1 if self._process.world_size > 1 else step
            self._store.set(_LAST_STEP, str(last))
            self._published = True
        return self._store.check([_LAST_STEP]) and step >= int(self._store.get(_LAST_STEP))

    def _starts(self, name: str) -> bool:
        """Notes a signal, and limits the time to save; returns whether none was known yet."""
        with self._lock:
            if self._heard or self._left.is_set():
                return False
            self._heard = name
        if not self.is_interrupt:
            self._hurry(SAVE_SECONDS, name)
        return True

    def _hurry(self, seconds: float, name: str) -> None:
        """Starts the timer for the end of the process, unless it runs."""
        with self._lock:
            if self._timer is not None or self._left.is_set():
                return
            why = (
                f"{name}: no step ended and was saved within {seconds:g} s; earlier checkpoints "
                "are unchanged"
            )
            self._timer = threading.Timer(seconds, self._stop_at_once, [why])
            self._timer.daemon = True
            self._timer.start()

    def _answer(self, ring: Ring) -> None:
        """Answers in the bell's thread, and learns whether all ranks do."""
        self._starts(ring.text)
        if self._left.is_set() or self._answered.is_set():
            return
        self._answered.set()  # first, so that `due` looks on all ranks once all have answered
        try:
            all_answer = self._all_answer(ring.store)
            late = [] if all_answer or self._say is None else self._late(ring.store)
        except RuntimeError as error:  # the store is gone: peers may be, too
            self._stop_at_once(f"cannot agree with the other ranks: {error}")
            return
        if all_answer:
            self._ready.set()
            again = "; Ctrl-C again ends the run" if self.is_interrupt else ""
            self._tell(f"{ring.text}: saving after the step that is under way{again}")
        else:
            who = name_ranks(late) if late else "a rank in time"
            self._stop_at_once(f"{ring.text}: no answer from {who}; nothing is saved")

    def _all_answer(self, store: Store) -> bool:
        """Returns whether all ranks answer in time: the same on all ranks that do.

        The last to answer agrees for all; the first whose time is up refuses for all.
        """
        size = self._process.world_size
        store.set(_key(self._process.rank), "")
        is_last = store.add(_ANSWERS, 1) == size
        patience = AGREE_SECONDS + AGREE_SECONDS_PER_RANK * size
        if self._process.rank > 0:
            patience *= 2  # so that rank 0, which can print, is the one that refuses
        if not is_last:
            comes(store, [_AGREED], timedelta(seconds=patience))
        return store.compare_set(_AGREED, "", _YES if is_last else _NO).decode() == _YES

    def _late(self, store: Store) -> list[int]:
        return absent(store, [_key(rank) for rank in range(self._process.world_size)])

    def _stop_at_once(self, why: str) -> None:
        if not self._left.is_set():  # else the run ended by itself
            self._tell(why)
            self._end_process(128 + signal.SIGINT if self.is_interrupt else 1)

    def _tell(self, line: str) -> None:
        if self._say is not None and not self._left.is_set():
            with suppress(OSError):  # nobody reads it
                self._say(line)


def _key(rank: int) -> str:
    return f"end/answer/{rank}"
