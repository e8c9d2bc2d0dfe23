"""A thread that reports all ranks' waits when one waits too long, or when a user asks."""

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

from torch.distributed import DistError, DistNetworkError

from axonn_ext import _C
from axonn_ext.overlap import Orchestrator
from axonn_ext.ranks.launch.bell import LEAVE_SECONDS, Bell, Ring
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import BATCH, absent, file_name
from axonn_ext.train.watchdog.diagnosis import Reports, diagnose
from axonn_ext.train.watchdog.report import Report, stacks, take_report
from axonn_ext.train.watchdog.summary import ASKED, HANGS, SUMMARY_FILE

MOST_MARGIN_SECONDS = 30.0
MOST_GATHER_SECONDS = 5.0
_QUIET_SECONDS = 10.0  # minimum time between two requests because of lateness
_DEAF_SECONDS = 2.0  # while further signals, also from other ranks, count as the same request
_LOOK_SECONDS = 0.25  # how often this rank checks whether it has waited too long
_LEAST_ROUND_SECONDS, _MOST_ROUND_SECONDS = 0.02, 0.5  # between two rounds of reading reports
_TOPIC, _CHANGES = "report", "watchdog/changes"  # the latter counts reports and ended ranks


@dataclass(frozen=True)
class Times:
    """Seconds until a watchdog asks for reports, and for which it gathers them."""

    long: float
    gather: float

    @classmethod
    def before(cls, timeout_s: float) -> Times:
        """The times if waits fail after timeout_s: reports come shortly before that.

        All ranks are then still waiting. The time left is 30 s, or a quarter of timeout_s if that
        is less; reports are gathered in half of it, as a ring is heard a little later.
        """
        margin = min(MOST_MARGIN_SECONDS, timeout_s / 4)
        return cls(timeout_s - margin, min(MOST_GATHER_SECONDS, margin / 2))


class Watchdog:
    """Context manager that watches this rank's waits; all ranks must enter it, inside the bell.

    If this rank has waited for a peer, or has ended no step, for times.long seconds, it asks all
    ranks for reports, by the bell. `hear` makes it ask at once. Every rank then writes its waits,
    its number of calls in each group and its Python stacks to FOLDER/hangs/NAME/rank-R.txt, and
    continues. The rank that asked names the rank that holds the job up in one line, also in
    summary.txt.

    say: shows the line. orchestrators: this rank's; may be set later.
    """

    orchestrators: Sequence[Orchestrator] = ()

    def __init__(
        self, bell: Bell, process: Process, folder: Path, *, times: Times,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._times = times
        self._bell, self._store = bell, bell.store
        self._process, self._folder, self._say = process, folder, say
        self._reported: str | None = None  # the key of this rank's last report
        self._next_ring = 0  # the ring after the last request that this rank answered
        self._quiet_until = 0.0  # until then, this rank does not ask again because of lateness
        self._deaf_until = 0.0  # until then, not because of a signal either
        self._last_step = math.inf
        self._left, self._failed = threading.Event(), False
        self._heard: queue.SimpleQueue[signal.Signals | Ring | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        bell.hears(_TOPIC, self._heard.put)

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
        # After a failure, a request to the store may never be answered.
        self._thread.join(LEAVE_SECONDS if self._failed else None)

    def hear(self, number: signal.Signals) -> None:
        """Records that this rank got the SIGNAL; any thread may call it."""
        self._heard.put(number)

    def step_ended(self) -> None:
        """Records the end of a step, so that the watchdog notices if no other follows."""
        self._last_step = time.monotonic()

    def _watch(self) -> None:
        while not self._left.is_set():
            heard = None
            with suppress(queue.Empty):
                heard = self._heard.get(timeout=_LOOK_SECONDS)
            try:
                self._ask_or_answer(heard)
            except DistNetworkError:
                return  # the process that holds the store has ended
            except Exception as error:  # a report must not end the watch, nor the job
                with suppress(Exception):
                    self._say(f"no report: {type(error).__name__}: {error}")
        how = "its end, after a failure" if self._failed else "its end: its work is done"
        with suppress(DistError):
            self._store.set(_left_key(self._process.rank), how)
            self._store.add(_CHANGES, 1)

    def _ask_or_answer(self, heard: signal.Signals | Ring | None) -> None:
        if isinstance(heard, Ring):
            try:
                self._answer(heard.number, json.loads(heard.text))
            finally:
                self._next_ring = heard.number + 1
                self._quiet_until = time.monotonic() + max(self._times.long, _QUIET_SECONDS)
                self._deaf_until = time.monotonic() + _DEAF_SECONDS
            return
        why = self._overdue() if heard is None else f"it got {heard.name}"
        if why is not None and time.monotonic() > self._deaf_until:
            self._deaf_until = time.monotonic() + _DEAF_SECONDS
            self._ask(why, stuck=heard is None)

    def _overdue(self) -> str | None:
        """Returns what has taken too long; None if nothing has."""
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
        """Asks all ranks for reports. If several ranks ask at once, the first one counts."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._process.rank}{'' if stuck else ASKED}"
        question = {"name": name, "rank": self._process.rank, "why": why, "stuck": stuck}
        self._bell.ring(_TOPIC, json.dumps(question), since=self._next_ring)

    def _answer(self, number: int, question: Mapping[str, Any]) -> None:
        report = take_report(self._process.rank, self.orchestrators)
        if self._reported is not None:
            self._store.delete_key(self._reported)
        self._reported = _report_key(number, report.rank)
        self._store.set(self._reported, report.to_json())
        self._store.add(_CHANGES, 1)
        folder = self._folder / HANGS / file_name(question["name"])
        why = f"Rank {question['rank']} asked all ranks for reports: {question['why']}.\n\n"
        self._write(folder / f"rank-{report.rank}.txt", f"{why}{report.text()}\n{stacks()}")
        if question["rank"] == self._process.rank:
            reports = self._gather(number)
            if not self._left.is_set() or self._failed:
                unheard = set(range(self._process.world_size)) - reports.keys()
                said = diagnose(reports, stuck=question["stuck"], unheard=unheard)
                line = f"{said} (reports: {folder})"
                self._write(folder / SUMMARY_FILE, f"{line}\n")
                self._say(line)

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self._say(f"cannot write {path}: {error.strerror}")

    def _gather(self, number: int) -> Reports:
        """Returns the reports of all ranks; None for those still missing after the time limit.

        Ranks that were not checked after the time limit are left out. Until something changes, each
        check costs the store one operation.
        """
        reports: dict[int, Report | None] = {}
        missing: Sequence[int] = range(self._process.world_size)
        deadline, pause = time.monotonic() + self._times.gather, _LEAST_ROUND_SECONDS
        looked = counted = -1
        while missing and not self._left.wait(pause):
            is_late = time.monotonic() > deadline
            before, counted = counted, self._store.add(_CHANGES, 0)
            if counted != before and not is_late:  # answers still arrive
                pause = _LEAST_ROUND_SECONDS
                continue
            if counted == looked and not is_late:
                pause = min(2 * pause, _MOST_ROUND_SECONDS)
                continue
            looked = counted
            reports |= self._read(number, missing)
            missing = [rank for rank in missing if rank not in reports]
            if is_late:
                return reports | dict.fromkeys(missing)
        return reports

    def _read(self, number: int, ranks: Sequence[int]) -> dict[int, Report]:
        """Returns the available reports of these ranks, including those on how a rank ended."""
        reports: dict[int, Report] = {}
        for first in range(0, len(ranks), BATCH):
            batch = ranks[first : first + BATCH]
            keys = {rank: _report_key(number, rank) for rank in batch}
            silent = {batch[i] for i in absent(self._store, list(keys.values()))}
            there = [rank for rank in batch if rank not in silent]
            for text in self._store.multi_get([keys[rank] for rank in there]) if there else ():
                report = Report.from_json(text)
                reports[report.rank] = report
            left = {rank: _left_key(rank) for rank in batch if rank in silent}
            running = {[*left][i] for i in absent(self._store, list(left.values()))}
            for rank in left.keys() - running:
                reports[rank] = Report.of_ended(rank, self._store.get(left[rank]).decode())
        return reports


def _report_key(number: int, rank: int) -> str:
    return f"watchdog/{number}/report/{rank}"


def _left_key(rank: int) -> str:
    return f"watchdog/left/{rank}"
