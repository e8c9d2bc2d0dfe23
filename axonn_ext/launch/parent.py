"""Ends a process together with the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with(parent: int) -> None:
    """Makes Linux kill this process when its parent ends, which may already have happened.

    parent: the id of the process that has started this one
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
