"""Claims the folder of a run for one job, so that no other job removes its files."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from axonn_ext.spec.files.errors import InputError, printable
from axonn_ext.spec.files.files import open_new, read_json
from axonn_ext.terminal.errors import UserError

CLAIM = ".job.json"  # in the folder, while a job writes there
ALIVE_SECONDS = 10.0  # how often a job touches its claim
SILENT_SECONDS = 60.0  # a job on another host that has not touched its claim for this long is over
_TRIES = 10  # attempts to take over a claim while other jobs try the same
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


@dataclass(frozen=True)
class Owner:
    """A process that writes into a folder.

    place    the boot and namespace in which its pid is valid, unique to a host
    started  start time of the process in the system's ticks since boot, as pids are reused
    since    the date, for display
    """

    host: str
    pid: int
    place: str
    started: str
    since: str

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        pid, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), pid, _place(), _started(pid), since)

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """The process that a file names; None if the file is missing or unreadable."""
        try:
            values = read_json(path)
            return cls(**{key: kind(values[key]) for key, kind in _FIELDS.items()})
        except (InputError, KeyError, TypeError, ValueError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether its pid is valid in this place."""
        return bool(self.place) and self.place == _place()

    @property
    def has_ended(self) -> bool:
        """Whether the process, one of this place, has ended."""
        return _started(self.pid) != self.started and not _is_hidden(self.pid)


_FIELDS = {"host": str, "pid": int, "place": str, "started": str, "since": str}


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Returns the start time of a process; "" if there is no such process."""
    try:
        # The name before it is in parentheses, and may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Whether the pid is that of another user's process, which /proc may hide."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def claimed(folder: Path) -> Iterator[Callable[[], None]]:
    """Creates the folder and claims it for this process until the block ends.

    Yields a function that releases it early, for a process that exits immediately.

    The claim is a file created by a hard link, which is atomic on network file systems too, unlike
    their locks, which cannot be relied on. The claim of a job that has ended is taken over. A job
    on another host counts as ended if it does not touch its claim for SILENT_SECONDS, for which
    this process waits. Raises UserError, which names the other job.
    """
    path, owner = folder / CLAIM, Owner.this()
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out {folder}: expected a folder, got a file")
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        _take(folder, path, owner)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot write there: {error.strerror}") from None
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(path, owner, ended), name="claim", daemon=True)
    keeper.start()

    def free() -> None:
        ended.set()
        with suppress(OSError):
            if Owner.read(path) == owner:
                path.unlink()
            if is_new:
                folder.rmdir()  # if nothing was written

    try:
        yield free
    finally:
        free()
        keeper.join()


def _keep(path: Path, owner: Owner, ended: threading.Event) -> None:
    """Touches the claim for as long as this process owns it."""
    while not ended.wait(ALIVE_SECONDS) and Owner.read(path) == owner:
        with suppress(OSError):
            os.utime(path)


def _take(folder: Path, path: Path, owner: Owner) -> None:
    own = folder / f".job-{uuid.uuid4().hex}.partial"
    text = (json.dumps(asdict(owner)) + "\n").encode()
    with open_new(own) as file:
        file.write(text)
    try:
        for _ in range(_TRIES):
            try:
                _link(own, path, text)
            except FileExistsError:
                _remove_ended(folder, path)
            else:
                return
        raise UserError(f"--out {folder}: several jobs are trying to claim this folder")
    finally:
        own.unlink(missing_ok=True)


def _link(own: Path, path: Path, text: bytes) -> None:
    """Makes the claim. Raises FileExistsError if there is one."""
    try:
        os.link(own, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with path.open("xb") as file:  # on file systems without hard links
            file.write(text)


def _remove_ended(folder: Path, path: Path) -> None:
    """Removes the claim of a job that has ended. Raises UserError for any other."""
    owner = Owner.read(path)
    if owner is None and not path.exists():
        return  # just removed
    ended = owner.has_ended if owner is not None and owner.is_here else _is_silent(path)
    if not ended:
        who = "another job" if owner is None else f"pid {owner.pid} on {owner.host}"
        since = "" if owner is None else f" (since {owner.since})"
        raise UserError(
            f"--out {folder} is in use by {printable(who + since)}: wait for that job to finish, "
            "or use another folder"
        )
    aside = path.with_name(f".job-{uuid.uuid4().hex}.partial")
    with suppress(FileNotFoundError):
        path.rename(aside)  # if several jobs try, one succeeds
        if Owner.read(aside) != owner:  # another job was faster
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _is_silent(path: Path) -> bool:
    """Waits up to SILENT_SECONDS; returns whether nobody touched the claim meanwhile."""
    deadline, before = time.monotonic() + SILENT_SECONDS, _touched(path)
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SILENT_SECONDS))
        if (now := _touched(path)) != before:
            return now is None
    return True


def _touched(path: Path) -> int | None:
    """Returns when the claim was last touched, by its file system's clock; None if it is gone."""
    try:
        with path.open("rb") as file:  # opening makes a network file system ask its server
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
