"""Starts the trainer as a user does, as a command, and captures its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
AXONN = (sys.executable, "-m", "axonn_ext")

# A model that starts at once and learns something in a few steps.
SMALL = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.sequence_length": 32,
    "data.max_bytes": 200_000,
    "optim.lr": 3e-3,
    "optim.warmup_steps": 2,
    "train.device": "cpu",
    "train.threads": 1,
    "train.steps": 6,
    "train.batch_size": 8,
    "train.eval_interval": 3,
    "train.eval_batches": 2,
}


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    output: str


def torchrun(num_processes: int) -> tuple[str, ...]:
    """The start of a torchrun command, on its own port."""
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    )
    return (*launcher, f"--nproc-per-node={num_processes}", "-m", "axonn_ext")


def small(**overrides: object) -> list[str]:
    """Overrides for a small run; a double underscore stands for the dot of a key."""
    changed = {key.replace("__", "."): value for key, value in overrides.items()}
    return [f"--{key}={_text(value)}" for key, value in (SMALL | changed).items()]


def start(command: Sequence[str], *, output: Path) -> subprocess.Popen[bytes]:
    """Starts a command in the root of the checkout, with its output in a file.

    It resets signals that this process ignores, e.g. under nohup or in the background.
    """
    with output.open("wb") as stream:
        return subprocess.Popen(
            list(command), cwd=ROOT, env=environment(), stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=heed_signals,
        )  # fmt: skip


def heed_signals() -> None:
    """Resets the signals that this process may ignore; for a new process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(command: Sequence[str]) -> Finished:
    """Runs a command in the root of the checkout, and waits for its end."""
    done = subprocess.run(
        list(command), cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition; fails after HANG_SECONDS, with `what` in the message."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {HANG_SECONDS} s for {what}"
        time.sleep(0.02)


def processes_with(argument: str) -> dict[int, int]:
    """pid -> rank of the running worker processes with `argument` on their command line.

    `axonn-ext` forks its ranks in order, so they have its command line and environment.
    """
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            command = _texts(entry, "cmdline")
            if not any(argument in text for text in command):
                continue
            place = [v for v in _texts(entry, "environ") if v.startswith("RANK=")]
        except OSError:
            continue  # it has ended, or is not ours
        if place:
            found[pid] = int(place[0].removeprefix("RANK="))
            continue
        for rank, child in enumerate(workers_of(pid)):
            with suppress(OSError):
                if _texts(Path(f"/proc/{child}"), "cmdline") == command:
                    found.setdefault(child, rank)
    return found


def workers_of(pid: int) -> list[int]:
    """The running child processes of this one."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def _texts(entry: Path, file: str) -> list[str]:
    return (entry / file).read_bytes().decode(errors="replace").split("\0")


def running() -> list[int]:
    """The pids of all running processes."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def shared_segments(pids: Iterable[int]) -> set[str]:
    """The symmetric memory segments (device and inode) that these processes map or hold open."""
    found = set()
    for entry in (Path(f"/proc/{pid}") for pid in pids):
        try:
            maps = (entry / "maps").read_text().splitlines()
            for descriptor in (entry / "fd").iterdir():
                if "memfd:axonn" in os.readlink(descriptor):
                    found.add(f"{os.stat(descriptor).st_dev} {os.stat(descriptor).st_ino}")
        except OSError:
            continue  # it has ended, or is not ours
        for line in maps:
            if "memfd:axonn" in line:
                _, _, _, device, inode, *_ = line.split()
                found.add(f"{device} {inode}")
    return found


def environment() -> dict[str, str]:
    """The environment of this process, without the variables that torchrun sets."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in launched and not name.startswith("TORCHELASTIC")
    } | {"COLUMNS": "120"}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
