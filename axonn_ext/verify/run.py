"""Runs each group of cases in its own processes, so that a crash fails only one group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axonn_ext.kernels.verified import Verdict
from axonn_ext.spec.settings import PRODUCT_KERNELS, worker_environment
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.verify.groups import MAX_FAILURES, Group
from axonn_ext.verify.worker import Task

STATUSES = PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
TOTAL_SECONDS = 170.0
LEAST_SECONDS = 8.0  # the time that a process takes to start
GRACE_SECONDS = 3.0  # the time that peers of a failed process have to report their own failure
WAIT_SECONDS = 20.0  # the time that a rank waits for a peer, less than the time of any group
TIME_WAS_UP = "the time was up"
NOT_STARTED = "its processes did not get as far as the cases"  # no kernel can be the reason


@dataclass(frozen=True)
class Outcome:
    """The outcome of a group."""

    group: Group
    status: str
    reason: str = ""  # why the group failed or was not run
    cases: int = 0
    seconds: float = 0.0


def run_groups(groups: Iterable[Group], *, device: str = "cuda") -> Iterator[Outcome]:
    """Runs one group after another until the time is up; the rest counts as not run."""
    groups = list(groups)
    compile_seconds = sum(group.compile_seconds for group in groups)
    deadline = time.monotonic() + TOTAL_SECONDS + compile_seconds
    for group in groups:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            yield Outcome(group, NOT_RUN, TIME_WAS_UP)
        else:
            yield run_group(group, seconds=min(group.seconds, left), device=device)


def run_group(group: Group, *, seconds: float, device: str = "cuda") -> Outcome:
    """Runs a group, and ends its processes after that many seconds.

    This counts as a failure only if they had the group's own time.
    """
    start = time.monotonic()
    with (
        _noting_signals() as heard,
        tempfile.TemporaryDirectory(prefix="axonn_verify_") as folder,
    ):
        processes = _Processes(group, Path(folder), heard)
        try:
            processes.start(device=device)
            late = not processes.wait(start + seconds)
        finally:
            processes.end()
        cut = seconds < group.seconds
        status, reason, cases = _judge(processes, seconds if late else None, cut=cut)
    return Outcome(group, status, reason, cases, time.monotonic() - start)


def verdicts_of(outcomes: Iterable[Outcome]) -> dict[str, Verdict]:
    """Returns the verdict on each kernel.

    A kernel that has not failed gets no verdict if a group of a single GPU was not run. `ranks` of
    a verdict is the largest number of GPUs for which every group has passed.
    """
    by_kernel: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kernel.setdefault(outcome.group.kernel, []).append(outcome)
    verdicts = {}
    for kernel, found in by_kernel.items():
        incomplete = {o.group.gpus for o in found if o.status != PASSED}
        ranks = max({o.group.gpus for o in found} - incomplete, default=1)
        reasons = {o.group.name: o.reason for o in found if o.status == FAILED}
        if reasons or all(o.status == PASSED for o in found if o.group.gpus == 1):
            verdicts[kernel] = Verdict(ranks, reasons)
    return verdicts


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Notes SIGTERM and SIGINT in a list; at the end, raises a TrainingError or KeyboardInterrupt.

    If the handler raised, it could do so while subprocess.Popen holds its lock, which would then
    never be released, or before a started process is registered for cleanup.
    """
    heard: list[int] = []
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: heard.append(number)) for n in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        raise KeyboardInterrupt if heard[0] == signal.SIGINT else TrainingError("ended by SIGTERM")


class _Processes:
    """The processes of a group, each in its own session. Their output and results go to files.

    heard  the signals received so far; after the first, waits return at once
    """

    def __init__(self, group: Group, folder: Path, heard: Sequence[int]) -> None:
        self._group, self._folder, self._heard = group, folder, heard
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *, device: str) -> None:
        """Starts all processes. If one cannot be started, `end` ends those that run."""
        group = self._group
        store = str(self._folder / "store")
        for rank in range(group.num_ranks):
            result = self.result_of(rank)
            result.write_text(json.dumps({"unsupported": NOT_STARTED}), encoding="utf-8")
            task = Task(
                group.target, rank, group.num_ranks, store, device, str(result), os.getpid()
            )
            command = [
                sys.executable,
                "-m",
                "axonn_ext.verify.worker",
                json.dumps(asdict(task)),
            ]
            with self.output_of(rank).open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(group),
                    start_new_session=True,
                )
            self.running.append(process)

    def result_of(self, rank: int) -> Path:
        return self._folder / f"result{rank}.json"

    def output_of(self, rank: int) -> Path:
        return self._folder / f"output{rank}"

    def found_by(self, rank: int) -> dict[str, Any]:
        """Returns the result that a rank's process wrote; empty if it ended amid its cases."""
        try:
            found = json.loads(self.result_of(rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        status = self.running[rank].returncode
        if found.get("unsupported") == NOT_STARTED and status != -signal.SIGKILL:
            found["unsupported"] += f": {_death(rank, status, self.output_of(rank))}"
        return dict(found)

    def wait(self, deadline: float) -> bool:
        """Whether all ended in time. Once one has failed, the others get little time."""
        while not self._heard and any(process.poll() is None for process in self.running):
            if any(process.poll() for process in self.running):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                self._wait_until(deadline)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _wait_until(self, deadline: float) -> None:
        while time.monotonic() < deadline and any(p.poll() is None for p in self.running):
            if self._heard:
                return
            time.sleep(0.02)

    def end(self) -> None:
        """Kills the remaining processes, and those that they may have started."""
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(group: Group) -> Mapping[str, str]:
    """Returns an environment without measurements and stamps, which may lock the kernel."""
    kinds = group.kernel if group.kernel in PRODUCT_KERNELS else ""
    return worker_environment(
        AXONN_CACHE_DIR="",
        AXONN_PRODUCT_KERNELS=kinds,
        AXONN_TIMEOUT_SECONDS=str(WAIT_SECONDS),
        CUDA_DEVICE_MAX_CONNECTIONS="32",  # streams of virtual ranks must not share a queue
    )


def _judge(processes: _Processes, late_s: float | None, *, cut: bool) -> tuple[str, str, int]:
    """Returns status, reason and number of cases.

    late_s  the time limit that was exceeded; None if all processes ended in time
    cut     whether the limit was below the group's own seconds
    """
    wrong: list[str] = []  # wrong values
    ends: list[str] = []  # how processes ended in the middle of the cases
    not_run: list[str] = []
    cases = 0
    for rank, process in enumerate(processes.running):
        found = processes.found_by(rank)
        wrong += found.get("failures", [])
        cases = max(cases, found.get("cases", 0))
        if "unsupported" in found:
            not_run.append(found["unsupported"])
        elif late_s is not None and process.returncode == -signal.SIGKILL:
            ends.append(f"rank {rank} had not ended after {late_s:.0f} s")
        elif process.returncode != 0 or not found:
            ends.append(_death(rank, process.returncode, processes.output_of(rank)))
    if not wrong and late_s is not None and cut:
        return NOT_RUN, TIME_WAS_UP, 0
    if not wrong and not_run:
        # Ranks that did not start, or were ended with those, know less about the reason.
        return NOT_RUN, min(not_run, key=lambda reason: reason == NOT_STARTED), 0
    if not wrong and not ends:
        return PASSED, "", cases
    ends.sort(key=lambda text: "SIGKILL" in text)
    failures = [*wrong, *ends]
    more = len(failures) - MAX_FAILURES
    text = "; ".join(failures[:MAX_FAILURES]) + (f"; and {more} more" if more > 0 else "")
    return FAILED, text, cases


def _death(rank: int, status: int, output: Path) -> str:
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"rank {rank} {how}" + (f": {lines[-1].strip()[:300]}" if lines else "")
