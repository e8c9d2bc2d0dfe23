"""A thread that reports what all ranks wait for when one waits too long, or when a user asks."""

from __future__ import annotations

import json
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import DistError, DistNetworkError, Store

from axonn_ext import _C
from axonn_ext.launch.place import Process
from axonn_ext.overlap import Orchestrator
from axonn_ext.stores import file_name
from axonn_ext.watchdog.diagnosis import Reports, diagnose
from axonn_ext.watchdog.report import Report, stacks, take_report
from axonn_ext.watchdog.summary import ASKED, HANGS, SUMMARY_FILE

MOST_MARGIN_SECONDS = 30.0
MOST_GATHER_SECONDS = 5.0
_QUIET_SECONDS = 10.0  # the least between two questions for being late
_DEAF_SECONDS = 2.0  # in which further signals are the same question, as that to another rank
_LEAVE_SECONDS = 2.0
_POLL_SECONDS = 0.25
_RANKS_PER_POLL = 256  # with more ranks, each polls less often, for the sake of the one store


@dataclass(frozen=True)
class Times:
    """After how many seconds a watchdog asks for reports, and how long it gathers them."""

    long: float
    gather: float

    @classmethod
    def before(cls, timeout_s: float) -> Times:
        """The times where a wait fails after timeout_s: reports come shortly before.

        All ranks are then still where they wait. The time left is 30 s, or a quarter of timeout_s
        if that is less; the reports are gathered in most of it.
        """
        margin = min(MOST_MARGIN_SECONDS, timeout_s / 4)
        return cls(timeout_s - margin, min(MOST_GATHER_SECONDS, 0.8 * margin))


class Watchdog:
    """Watches the waits of this rank while it is entered, which all ranks must do.

    If this rank has waited for a peer, or has ended no step, for times.long seconds, it asks all
    ranks for reports. `hear` makes it ask at once. Every rank then writes what it waits for, how
    many calls it has made in each group and its Python stacks to FOLDER/hangs/NAME/rank-R.txt, and
    goes on. The rank that asked says in one line, also in summary.txt, which rank holds the job up.

    say: shows the line. orchestrators: those of this rank; they may be set later.
    """

    orchestrators: Sequence[Orchestrator] = ()

    def __init__(
        self, store: Store, process: Process, folder: Path, *, times: Times,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._times = times
        # A store waits for one call after the other, so that the thread has one of its own.
        self._store: Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
        self._process, self._folder, self._say = process, folder, say
        self._number = 0  # counts the questions so far, the same on all ranks
        self._quiet_until = 0.0  # until then, this rank does not ask again for being late
        self._deaf_until = 0.0  # until then, not for a signal either
        self._last_step = math.inf
        self._left, self._failed = threading.Event(), False
        self._heard: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._last_step = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._failed = error is not None
        self._left.set()
        self._heard.put(None)
        # After a failure, a question to the store may have no answer.
        self._thread.join(_LEAVE_SECONDS if self._failed else None)

    def hear(self, number: signal.Signals) -> None:
        """Tells it, from any thread, that this rank got the SIGNAL."""
        self._heard.put(number)

    def step_ended(self) -> None:
        """Tells it that a step ended, so that it notices if no other does."""
        self._last_step = time.monotonic()

    def _watch(self) -> None:
        poll = _POLL_SECONDS * max(1.0, self._process.world_size / _RANKS_PER_POLL)
        while not self._left.is_set():
            number = None
            with suppress(queue.Empty):
                number = self._heard.get(timeout=poll)
            try:
                self._ask_or_answer(number)
            except DistNetworkError:
                return  # the process that holds the store has ended
            except Exception as error:  # a report must not end the watch, nor the job
                with suppress(Exception):
                    self._say(f"no report: {type(error).__name__}: {error}")
        how = "its end, after a failure" if self._failed else "its end: its work is done"
        with suppress(DistError):
            self._store.set(f"watchdog/left/{self._process.rank}", how)

    def _ask_or_answer(self, number: signal.Signals | None) -> None:
        why = self._overdue() if number is None else f"it got {number.name}"
        if why is not None and time.monotonic() > self._deaf_until:
            self._ask(why, stuck=number is None)
        if self._store.check([self._key("asked")]):
            try:
                self._answer(json.loads(self._store.get(self._key("asked"))))
            finally:
                self._number += 1
                self._quiet_until = time.monotonic() + max(self._times.long, _QUIET_SECONDS)
                self._deaf_until = time.monotonic() + _DEAF_SECONDS

    def _overdue(self) -> str | None:
        """Says what has lasted too long; None if nothing has."""
        now = time.monotonic()
        if now < self._quiet_until:
            return None
        seconds = max((wait.seconds for wait in _C.waits_under_way()), default=0.0)
        if seconds > self._times.long:
            return f"it has waited for {seconds:.1f} s"
        if now - self._last_step > self._times.long:
            return f"no step of it has ended for {now - self._last_step:.1f} s"
        return None

    def _ask(self, why: str, *, stuck: bool) -> None:
        """Asks all ranks for reports. If several ranks ask at once, the first one has asked."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._number}{'' if stuck else ASKED}"
        question = {"name": name, "rank": self._process.rank, "why": why, "stuck": stuck}
        self._store.compare_set(self._key("asked"), "", json.dumps(question))

    def _answer(self, question: Mapping[str, Any]) -> None:
        report = take_report(self._process.rank, self.orchestrators)
        self._store.set(self._key(f"report/{report.rank}"), report.to_json())
        folder = self._folder / HANGS / file_name(question["name"])
        why = f"Rank {question['rank']} asked all ranks for reports: {question['why']}.\n\n"
        self._write(folder / f"rank-{report.rank}.txt", f"{why}{report.text()}\n{stacks()}")
        if question["rank"] == self._process.rank:
            reports = self._gather()
            if not self._left.is_set() or self._failed:
                line = f"{diagnose(reports, stuck=question['stuck'])} (reports: {folder})"
                self._write(folder / SUMMARY_FILE, f"{line}\n")
                self._say(line)

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self._say(f"cannot write {path}: {error.strerror}")

    def _gather(self) -> Reports:
        """Returns the reports of all ranks; None for those that give none in time."""
        reports: dict[int, Report | None] = dict.fromkeys(range(self._process.world_size))
        deadline = time.monotonic() + self._times.gather
        missing = list(reports)
        while missing and time.monotonic() < deadline and not self._left.is_set():
            for rank in missing:
                reports[rank] = self._report_of(rank)
            missing = [rank for rank, report in reports.items() if report is None]
            time.sleep(0.02 if missing else 0)
        return reports

    def _report_of(self, rank: int) -> Report | None:
        key, left = self._key(f"report/{rank}"), f"watchdog/left/{rank}"
        if self._store.check([key]):
            return Report.from_json(self._store.get(key))
        if self._store.check([left]):
            return Report.of_ended(rank, self._store.get(left).decode())
        return None

    def _key(self, what: str) -> str:
        return f"watchdog/{self._number}/{what}"
