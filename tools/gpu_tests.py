"""Runs the tests marked gpu of a lane, and the rest of them if one hangs or ends the process.

    gpu_tests.py RESULTS.jsonl LANE PART HANG_SECONDS [FILES]

gpu_tests_plugin.py defines the lanes and writes the results. If pytest ends early (a lost CUDA
context, a hang, a crash), a new process continues after that test. If RESULTS.jsonl exists, the
lane continues where it stopped. Exit status: 1 if a test failed, 0 otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gpu_found import count_tests
from gpu_lines import LOST_STATUS, add_line, file_of_running, read_lines
from gpu_runs import ROOT, gpu_tests, how_it_ended

START_SECONDS = 60.0  # added to HANG_SECONDS at the start: torch may come from a cold disk


def main(arguments: Sequence[str]) -> int:
    results, lane, part, hang_seconds, *files = arguments
    path = Path(results)
    began_at = path.stat().st_size if path.exists() else 0
    signal.signal(signal.SIGTERM, _exit)
    with contextlib.suppress(SystemExit):
        run_lane(path, lane, part, float(hang_seconds), files or gpu_tests())
    counts = count_tests(path, began_at)
    print(f"\n{counts.sentence()}", flush=True)
    return int(bool(counts.failed))


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def run_lane(
    results: Path, lane: str, part: str, hang_seconds: float, files: Sequence[str]
) -> None:
    """Starts pytest until every test of the lane has a line, or another start would not help."""
    command = [
        sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "gpu", "-q", "--no-header",
        "--tb=short", "-rN", "-p", "gpu_tests_plugin", "-p", "no:cacheprovider",
        "-o", f"faulthandler_timeout={hang_seconds / 2}",  # prints where each thread is
        "--continue-on-collection-errors", "--results", str(results), "--lane", lane,
        "--part", part, *files,
    ]  # fmt: skip
    running = file_of_running(results)
    while count_tests(results).not_reached != 0:
        running.unlink(missing_ok=True)  # left by a stage whose time was up
        num_lines = len(read_lines(results))
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            hung = not _wait(process, results, hang_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends its ranks
            process.wait()
        ended = f"it had not ended after {hang_seconds:.0f} s" if hung else (
            f"the process {how_it_ended(process.returncode)}"
        )  # fmt: skip
        if running.exists():
            test = running.read_text(encoding="utf-8")
            running.unlink()
            add_line(results, test=test, outcome="failed", seconds=None, reason=ended)
        elif process.returncode in (0, 1, 5):  # 5: no test was selected
            return
        elif process.returncode != LOST_STATUS:  # at the end, or before the first test
            add_line(results, outside="pytest", outcome="failed", reason=ended)
            if len(read_lines(results)) <= num_lines + 1:
                return  # another try would end the same way


def _wait(process: subprocess.Popen[bytes], results: Path, hang_seconds: float) -> bool:
    """Waits for the process to end; returns False if no test begins or ends for `hang_seconds`."""
    sign, deadline = None, time.monotonic() + hang_seconds + START_SECONDS
    while process.poll() is None:
        now = [_stamp(path) for path in (results, file_of_running(results))]
        if now != sign and any(now):
            wait = hang_seconds if now[1] else hang_seconds + START_SECONDS
            sign, deadline = now, time.monotonic() + wait
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
