"""Ends a process together with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_INIT = 1
_LOOK_SECONDS = 0.5


def end_with(parent: int, *, launcher: int | None = None) -> None:
    """Makes this process end, by SIGKILL, when its parent ends or if it already has.

    Linux sends the signal when the thread that started this process ends, but forgets the request
    if this process executes another program; so a thread checks, too.

    parent: the id of the process that started this one. launcher: the id of the job's launcher, if
    known; while it is alive, a process started by one of its ranks ends with that rank.
    """
    if launcher is not None and not _is_alive(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or (parent == _INIT and not _is_python(parent)):
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_look, args=(parent,), name="parent", daemon=True).start()


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _is_python(pid: int) -> bool:
    """Whether a process, which is this user's, runs Python, as torchrun does."""
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
