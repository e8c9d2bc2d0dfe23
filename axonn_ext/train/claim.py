"""Claims the folder of a run for one job, so that no other one removes what it writes."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from axonn_ext.inputs.errors import InputError, printable
from axonn_ext.inputs.files import open_new, read_json
from axonn_ext.terminal.errors import UserError

CLAIM = ".job.json"  # in the folder, while a job writes there
_TRIES = 10  # to take over a claim, while other jobs try the same


@dataclass(frozen=True)
class Job:
    """A process that writes into a folder.

    place    the boot and the namespace that its pid belongs to, which hosts do not share
    started  when the process did, in the system's ticks since boot, since pids are used again
    since    the date, for people
    """

    host: str
    pid: int
    place: str
    started: str
    since: str

    @classmethod
    def this(cls) -> Job:
        """This process."""
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), pid, _place(), _started(pid), since)

    @classmethod
    def read(cls, path: Path) -> Job | None:
        """The process that a file names; None if there is none, or nobody can tell which."""
        try:
            values = read_json(path)
            return cls(**{key: kind(values[key]) for key, kind in _FIELDS.items()})
        except (InputError, KeyError, TypeError, ValueError):
            return None

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have: only of this place's processes."""
        return bool(self.place) and self.place == _place() and _started(self.pid) != self.started


_FIELDS = {"host": str, "pid": int, "place": str, "started": str, "since": str}


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Returns when a process has started; "" if there is none."""
    try:
        # The name before it is in parentheses, and may have spaces and parentheses in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


@contextmanager
def claimed(folder: Path) -> Iterator[Callable[[], None]]:
    """Claims the folder, which is made, for this process; at the end it is free again.

    Yields what frees it before: for a process that ends at once.

    The claim is a file that is made by a hard link, which file systems on a network do atomically,
    too; their locks cannot be relied on. That of a process of this host that has ended is taken
    over. Raises UserError, which names the other job, and where nobody can tell whether it has
    ended, also the file.
    """
    path = folder / CLAIM
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out {folder}: expected a folder, got a file")
        folder.mkdir(parents=True, exist_ok=True)
        _take(folder, path)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot write there: {error.strerror}") from None

    def free() -> None:
        with suppress(OSError):
            path.unlink()
            folder.rmdir()  # if nothing was written

    try:
        yield free
    finally:
        free()


def _take(folder: Path, path: Path) -> None:
    own = folder / f".job-{uuid.uuid4().hex}.partial"
    with open_new(own) as file:
        file.write((json.dumps(asdict(Job.this())) + "\n").encode())
    try:
        for _ in range(_TRIES):
            try:
                os.link(own, path)
            except FileExistsError:
                _remove_ended(folder, path)
            else:
                return
        raise UserError(f"--out {folder}: several jobs begin to write there at the same time")
    finally:
        own.unlink(missing_ok=True)


def _remove_ended(folder: Path, path: Path) -> None:
    """Removes the claim of a job that has ended. Raises UserError for any other."""
    job = Job.read(path)
    if job is None and not path.exists():
        return  # it has just been removed
    if job is None or not job.has_ended:
        who = "another job" if job is None else f"pid {job.pid} on {job.host}, since {job.since},"
        here = job is not None and job.place == _place()
        hint = "" if here else f"; if that job has ended, remove {path}"
        raise UserError(
            f"--out {folder}: {printable(who)} writes there: wait for its end, or use another "
            f"folder{hint}"
        )
    aside = path.with_name(f".job-{uuid.uuid4().hex}.partial")
    with suppress(FileNotFoundError):
        path.rename(aside)  # of several jobs that try it, one succeeds
        if Job.read(aside) != job:  # another one has taken it over before
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
