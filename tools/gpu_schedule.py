"""Runs stages of gpu_check.py, each within its time limit, and records the results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_found import Found, last_line, of_rows, of_tests, of_training
from gpu_runs import Run, environment, how_it_ended
from gpu_stages import HANG, Row, Stage

LAST_SECONDS = 2.0  # reserved for printing the table
LEAST_SECONDS = 8.0  # minimum time of a stage: its processes need this long to start
LEAST_HANG_SECONDS = 40.0  # minimum hang limit of a test, as ranks take long to start
TESTS = ("test", "sanitize")  # kinds of stages
OK, FAILED, CUT = "ok", "failed", "time was up"
NOT_RUN, NO_TIME = "not run", "no time left"

Json = dict[str, Any]


@contextlib.contextmanager
def _sigterm_later() -> Iterator[None]:
    """Handles a SIGTERM after the block, so that no process starts without being recorded."""
    came: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
    if came:
        signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage; `found` is its summary line."""

    status: str
    seconds: float
    found: str
    exit_status: int | None = None


@dataclass
class Check:
    """Runs rows of stages, each within its time limit, and records the results.

    results   the folder of their files
    cache     AXONN_CACHE_DIR of the commands
    deadline  on the monotonic clock; None: there is none
    scale     the factor for a stage's seconds; None: each has ample time
    earlier   outcomes of an earlier run, by stage
    """

    results: Path
    cache: Path
    deadline: float | None = None
    scale: float | None = None
    machine: Json = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    earlier: dict[str, Outcome] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def left(self) -> float:
        """The seconds left for stages."""
        if self.deadline is None:
            return math.inf
        return self.deadline - LAST_SECONDS - time.monotonic()

    def seconds_of(self, stage: Stage) -> float:
        share = None if self.scale is None else max(stage.seconds * self.scale, LEAST_SECONDS)
        return min(stage.ample_seconds if share is None else share, self.left())

    def keep(self, stage: Stage, outcome: Outcome) -> None:
        self.outcomes[stage.name] = outcome
        self.say(f"{stage.name}: {outcome.status}, {outcome.seconds} s: {outcome.found}")
        self.write()

    def run_row(self, row: Row) -> None:
        """Runs the stages of a row at the same time, and waits for all of them."""
        if self.left() < LEAST_SECONDS:
            for stage in row:
                self.keep(stage, Outcome(NO_TIME, 0, ""))
            return
        running: list[tuple[Stage, Run, int]] = []
        try:
            for stage in row:
                began_at = stage.rows.stat().st_size if stage.rows.exists() else 0
                with _sigterm_later():
                    if run := self._start(stage):
                        running.append((stage, run, began_at))
            while running:
                time.sleep(0.02)
                for each in [each for each in running if each[1].has_ended()]:
                    running.remove(each)
                    self._ended(*each)
        finally:  # stages still run only if a signal ends this program
            for stage, run, began_at in running:
                run.time_was_up = True
                run.end()
                self._ended(stage, run, began_at)

    def _start(self, stage: Stage) -> Run | None:
        seconds = self.seconds_of(stage)
        hang = f"{max(LEAST_HANG_SECONDS, seconds / 2):.0f}"
        command = [hang if word == HANG else word for word in stage.command]
        # Tests must not see the measurements of other stages.
        cache = None if stage.kind in TESTS else self.cache
        try:
            return Run(command, seconds, self.log_of(stage), environment(cache))
        except OSError as error:
            self.keep(stage, Outcome(FAILED, 0, f"it could not be started: {error}"))
            return None

    def log_of(self, stage: Stage) -> Path:
        return self.results / f"{stage.name}.log"

    def _ended(self, stage: Stage, run: Run, began_at: int) -> None:
        seconds, found = round(run.seconds, 1), self._found(stage, began_at)
        if run.time_was_up:
            status = FAILED if found.wrong else CUT
        elif run.status == 0:
            status = FAILED if found.wrong else OK if found.ran else NOT_RUN
        else:
            status = FAILED
        line, last = found.line, last_line(self.log_of(stage))
        if status == FAILED and run.status not in (0, 1) and not run.time_was_up:
            line = f"{how_it_ended(run.status)}: {line}"
        if status == FAILED and last not in line:
            line = f"{line}: {last}"
        self.keep(stage, Outcome(status, seconds, line, run.status))

    def _found(self, stage: Stage, began_at: int) -> Found:
        try:
            if stage.kind == "train":
                if stage.rows.exists():
                    shutil.copy(stage.rows, self.results / f"{stage.name}.jsonl")
                return of_training(stage.rows, self.log_of(stage))
            if stage.kind in TESTS:
                return of_tests(stage.rows, began_at)
            return of_rows(stage.rows, self.log_of(stage))
        except (KeyError, TypeError, ValueError) as error:  # unexpected format
            return Found(f"{stage.rows.name} cannot be read: {error!r}", wrong=True)

    def skip(self, stage: Stage, reason: str) -> None:
        self.keep(stage, Outcome(NOT_RUN, 0, reason))

    def write(self) -> None:
        """Writes the summary atomically, so that an interruption never leaves half of it."""
        path = self.results / "summary.json"
        part = path.with_suffix(".part")
        outcomes = self.earlier | self.outcomes
        stages = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
        content = {"machine": self.machine, "stages": stages}
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @property
    def right(self) -> bool:
        """Whether nothing has failed and something has passed."""
        statuses = {outcome.status for outcome in self.outcomes.values()}
        return OK in statuses and FAILED not in statuses

    def show(self) -> None:
        """Prints the table of outcomes."""
        print(f"\n{'stage':<22} {'status':<13} {'s':>6}  found")
        for name, outcome in self.outcomes.items():
            found = " ".join(outcome.found.split())
            print(f"{name:<22} {outcome.status:<13} {outcome.seconds:>6}  {found[:230]}")
        print(f"in all {time.monotonic() - self.began:.0f} s; files in {self.results}", flush=True)


def read_earlier(path: Path, machine: Json) -> dict[str, Outcome]:
    """The outcomes of an earlier run on the same kind of machine, by stage."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        of_build = {"extension": "", "fused": ""}
        if content["machine"] | of_build != machine | of_build:  # a different GPU or software
            return {}
        return {name: Outcome(**values) for name, values in content["stages"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
