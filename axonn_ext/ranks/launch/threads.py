"""Recognizes errors that come from the machine's limit on processes and threads."""

from __future__ import annotations

import errno
import os
import resource
import threading

_NO_THREAD = "can't start new thread"  # Python's words; those of C and C++ are errno's


def ran_out(error: Exception) -> bool:
    """Whether the error says that no thread can be started, or none can be at the moment.

    Libraries fail in many ways if they get none: a second import of numpy, for example, complains
    about the first.
    """
    text = str(error)
    if _NO_THREAD in text or os.strerror(errno.EAGAIN) in text:
        return True
    try:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    except RuntimeError:
        return True
    return False


def describe_limit() -> str:
    """Returns the message for a user whose processes ran out of threads."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    shown = "no limit" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f"cannot start another process or thread (ulimit -u is {shown}, for all processes of this "
        "user; a container may have its own limit): raise the limit, use fewer processes, or "
        "set --train.threads 1"
    )
