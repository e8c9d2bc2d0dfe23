"""A thread that reports what all ranks wait for when one waits too long, or when a user asks."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torch.distributed import DistError, Store

from axonn_ext import _C
from axonn_ext.launch.place import Process
from axonn_ext.overlap import Orchestrator
from axonn_ext.watchdog.diagnosis import Reports, diagnose
from axonn_ext.watchdog.report import Report, stacks, take_report
from axonn_ext.watchdog.summary import HANGS, SUMMARY_FILE

MOST_MARGIN_SECONDS = 30.0
MOST_GATHER_SECONDS = 5.0
_LEAVE_SECONDS = 2.0
_DEAF_SECONDS = 2.0
_POLL_SECONDS = 0.25


def times_for(timeout_s: float) -> dict[str, float]:
    """Returns the watchdog's times where a wait fails after timeout_s: it reports shortly before.

    All ranks are then still where they wait. The time left is 30 s, or a quarter of timeout_s if
    that is less; the reports are gathered in most of it.
    """
    margin = min(MOST_MARGIN_SECONDS, timeout_s / 4)
    return {"long_s": timeout_s - margin, "gather_s": min(MOST_GATHER_SECONDS, 0.8 * margin)}


class Watchdog:
    """Watches the waits of this rank while it is entered, which all ranks must do.

    If this rank has waited for a peer for long_s, or has ended no step for so long, it asks all
    ranks for reports. `hear` makes it ask at once. Every rank then writes what it waits for, how
    many calls it has made in each group and its Python stacks to FOLDER/hangs/NAME/rank-R.txt, and
    goes on. The rank that asked says in one line, also in summary.txt, which rank holds the job up.

    gather_s: how long it waits for the reports of the others. say: shows its line. orchestrators:
    of this rank; may be set later.
    """

    orchestrators: Sequence[Orchestrator] = ()

    def __init__(
        self,
        store: Store,
        process: Process,
        folder: Path,
        *,
        long_s: float,
        gather_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._long_s, self._gather_s = long_s, gather_s
        # A store waits for one call after the other, so that the thread has one of its own.
        self._store: Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
        self._process, self._folder, self._say = process, folder, say
        self._number = 0  # of the reports so far
        self._quiet_until = 0.0  # so that one hang is reported once
        self._deaf_until = 0.0  # so that a signal to all ranks asks once
        self._last_step: float | None = None
        self._left = threading.Event()
        self._heard: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._left.set()
        self._heard.put(None)
        # After a failure, a question to the store may have no answer.
        self._thread.join(None if error is None else _LEAVE_SECONDS)

    def hear(self, number: signal.Signals) -> None:
        """Tells it, from any thread, that this rank got the SIGNAL."""
        self._heard.put(number)

    def step_ended(self) -> None:
        """Tells it that a step ended, so that it notices if no other does."""
        self._last_step = time.monotonic()

    def _watch(self) -> None:
        try:
            while not self._left.is_set():
                number = None
                with suppress(queue.Empty):
                    number = self._heard.get(timeout=_POLL_SECONDS)
                why = self._overdue() if number is None else f"it got {number.name}"
                if why is not None and time.monotonic() > self._deaf_until:
                    self._ask(why)
                if self._store.check([self._key("asked")]):
                    self._answer()
        except (DistError, OSError) as error:  # peers have ended, or nothing can be written
            if not self._left.is_set() and isinstance(error, OSError):
                self._say(f"no more reports: {error}")

    def _overdue(self) -> str | None:
        """Says what has lasted too long; None if nothing has."""
        now = time.monotonic()
        if now < self._quiet_until:
            return None
        seconds = max((wait.seconds for wait in _C.waits_under_way()), default=0.0)
        if seconds > self._long_s:
            return f"it has waited for {seconds:.1f} s"
        if self._last_step is not None and now - self._last_step > self._long_s:
            return f"its last step ended {now - self._last_step:.1f} s ago"
        return None

    def _ask(self, why: str) -> None:
        """Asks all ranks for reports. If several ranks ask at once, the first one has asked."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._number}"
        question = {"name": name, "rank": self._process.rank, "why": why}
        self._store.compare_set(self._key("asked"), "", json.dumps(question))

    def _answer(self) -> None:
        question = json.loads(self._store.get(self._key("asked")))
        report = take_report(self._process.rank, self.orchestrators)
        folder = self._folder / HANGS / question["name"]
        folder.mkdir(parents=True, exist_ok=True)
        why = f"Rank {question['rank']} asked all ranks for reports: {question['why']}.\n\n"
        text = f"{why}{report.text()}\n{stacks()}"
        (folder / f"rank-{report.rank}.txt").write_text(text, encoding="utf-8")
        self._store.set(self._key(f"report/{report.rank}"), report.to_json())
        if question["rank"] == self._process.rank:
            line = f"{diagnose(self._gather())} (reports: {folder})"
            (folder / SUMMARY_FILE).write_text(line + "\n", encoding="utf-8")
            self._say(line)
        self._number += 1
        self._quiet_until = time.monotonic() + self._long_s
        self._deaf_until = time.monotonic() + _DEAF_SECONDS

    def _gather(self) -> Reports:
        """Returns the reports of all ranks; None for those that give none in time."""
        reports: dict[int, Report | None] = dict.fromkeys(range(self._process.world_size))
        deadline = time.monotonic() + self._gather_s
        missing = list(reports)
        while missing and time.monotonic() < deadline and not self._left.is_set():
            for rank in missing:
                if self._store.check([self._key(f"report/{rank}")]):
                    text = self._store.get(self._key(f"report/{rank}"))
                    reports[rank] = Report.from_json(text)
            missing = [rank for rank, report in reports.items() if report is None]
            time.sleep(0.02 if missing else 0)
        return reports

    def _key(self, what: str) -> str:
        return f"watchdog/{self._number}/{what}"
