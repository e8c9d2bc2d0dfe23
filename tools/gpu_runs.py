"""Runs a command of gpu_check.py within its time limit, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL; part of a command's time
KILL_SECONDS = 5.0  # wait this long after SIGKILL, which cannot end a process in a hung driver
MAX_LOG_BYTES = 1_000_000
MARK = "GPU_CHECK_RUN"  # variable that marks a run's processes, also in other sessions


class Run:
    """A command and all processes that it starts, in a new session; its output goes to a file."""

    def __init__(
        self, command: Sequence[str], seconds: float, log: Path, variables: Mapping[str, str]
    ) -> None:
        """Raises OSError if the command cannot be started."""
        self.began = time.monotonic()
        self.time_was_up = False
        self._asked_at = self.began + max(seconds - GRACE_SECONDS, 0.0)
        self._log, self._mark = log, uuid.uuid4().hex
        with log.open("wb") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            try:
                self.process = subprocess.Popen(
                    command, cwd=ROOT, env={**variables, MARK: self._mark},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            except BaseException:  # a signal handler may raise after the process has started
                _kill_marked(f"{MARK}={self._mark}".encode())
                raise

    def has_ended(self) -> bool:
        """Whether the command has ended; ends it when its time is up."""
        now = time.monotonic()
        killed = self.time_was_up and now >= self._asked_at + GRACE_SECONDS
        if killed or self.process.poll() is not None:
            self.end()
            return True
        if now >= self._asked_at and not self.time_was_up:
            self.ask_to_end()  # always before killing it, even if this call comes late
        return False

    def ask_to_end(self) -> None:
        """Sends SIGTERM; the command is killed if it runs for another GRACE_SECONDS."""
        self.time_was_up, self._asked_at = True, time.monotonic()
        self.process.terminate()  # a launcher ends its ranks

    def end(self) -> None:
        """Kills all processes of the command that are left."""
        for _ in range(100):  # a process may start others meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            if not _kill_marked(f"{MARK}={self._mark}".encode()):
                break
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=KILL_SECONDS)
        _shorten(self._log)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def status(self) -> int | None:
        """The command's exit status, or minus the signal; None if nothing could end it."""
        return self.process.returncode


def _kill_marked(variable: bytes) -> int:
    """Kills the processes with this variable, in any session; returns their number."""
    killed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
        except OSError:  # it has ended, or is another user's
            continue
    return killed


def _shorten(log: Path) -> None:
    """Keeps the beginning and the end of a long file."""
    size = log.stat().st_size
    if size <= MAX_LOG_BYTES:
        return
    with log.open("rb+") as file:
        head = file.read(MAX_LOG_BYTES // 3)
        file.seek(size - MAX_LOG_BYTES * 2 // 3)
        tail = file.read()
        file.seek(0)
        file.truncate()
        file.write(head + b"\n[...]\n" + tail)


def execute(command: Sequence[str], seconds: float, log: Path) -> int | None:
    """Runs a command to its end; returns its exit status, or None if its time was up."""
    run = Run(command, seconds, log, environment())
    try:
        while not run.has_ended():
            time.sleep(0.02)
    finally:
        run.end()
    return None if run.time_was_up else run.status


def environment(cache: Path | None = None) -> dict[str, str]:
    """This process's environment, but imports the checkout and sees no earlier measurements.

    cache  the folder for the findings of `axonn-ext verify` and the measurements of later commands
    """
    folders = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        # The host's name may not resolve, and gloo's failing lookup takes long.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Ranks in one process have streams that wait for each other, so none may share a queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "AXONN_CACHE_DIR": str(cache or ""),
        "COLUMNS": "160",
    }


def how_it_ended(status: int | None) -> str:
    """How a command ended, e.g. "ended with status 3" or "was killed by SIGSEGV"."""
    if status is None:
        return "could not be ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def gpu_tests() -> list[str]:
    """The files with tests marked gpu, those of our kernels first."""
    files = [
        path for path in sorted((ROOT / "python_tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]  # fmt: skip
    files.sort(key=lambda path: path.name not in ("test_gpu_fused.py", "test_gpu_products.py"))
    return [str(path.relative_to(ROOT)) for path in files]
