"""Handles GPU kernels that are not yet verified: checks them if configured, and tells the user."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from axonn_ext.kernels import extension
from axonn_ext.kernels.locked import Lock, find_locks
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec import settings
from axonn_ext.spec.settings import worker_environment
from axonn_ext.train.config import AUTO
from axonn_ext.train.job import Job

VERIFY = (sys.executable, "-m", "axonn_ext", "verify")
SIGN_SECONDS = 1.0  # between signs of life; a quarter of AXONN_TIMEOUT_SECONDS if that is shorter
# The command takes about 3 minutes, or longer, but less than this, if Triton compiles kernels.
MOST_SECONDS = 1800.0
END_SECONDS = 5.0  # grace period for the command to end its processes
_GOES_ON = "training goes on without the kernels that are not verified"

Tell = Callable[[str], None]


def settle_kernels(
    job: Job, store: Store, here: Process, *, say: Tell, command: Sequence[str] = VERIFY
) -> str:
    """Applies [train] verify and rereads the stamps; all ranks call it together.

    Returns, on rank 0, a line about locked kernels; "" if there are none.
    """
    if job.config.train.verify == AUTO:
        verify_where_unknown(
            store, here, is_unknown=lambda: any(lock.unverified for lock in _locks_of(job)),
            say=say, command=command,
        )  # fmt: skip
    if job.device != "cuda":
        return ""
    # Only now do all ranks of a host read the same stamps. The line replaces the warning that the
    # ops would give.
    extension.configure(settings.load(), suggest_verify=False)
    return next((lock.line() for lock in _locks_of(job)), "") if here.rank == 0 else ""


def verify_where_unknown(
    store: Store, here: Process, *, is_unknown: Callable[[], bool], say: Tell,
    command: Sequence[str],
) -> None:  # fmt: skip
    """Runs `axonn-ext verify` on each host that needs it; all ranks return when it has ended.

    A failure is reported but is not an error: unverified kernels are not used.

    is_unknown  whether this host needs it; called only by its first process
    """

    def verify(alive: Callable[[], None]) -> None:
        if not is_unknown():
            return
        where = "" if here.world_size == here.local_world_size else f"{socket.gethostname()}: "
        say(f"{where}checking the GPU kernels by `axonn-ext verify`, as train.verify asks")
        problem = _run(command, alive, quiet=here.rank != 0)
        if problem:
            say(f"{where}{problem}")

    process.once_per_host(store, here, verify, topic="verify")


def _locks_of(job: Job) -> list[Lock]:
    """Returns the locks that matter to the job."""
    config, shape = job.config, job.config.grid
    uses_auto = config.parallel.algorithm == AUTO and config.model.implementation != "plain"
    if job.device != "cuda" or not uses_auto:
        return []
    return list(find_locks(dtype=job.dtype, sizes=(shape.x, shape.y, shape.z)).values())


def _run(command: Sequence[str], alive: Callable[[], None], *, quiet: bool) -> str:
    """Runs the command, calling `alive` meanwhile; returns the problem, or "" if there was none.

    quiet: drops the output, except errors
    """
    sign_seconds = min(SIGN_SECONDS, settings.load().timeout_seconds / 4)
    deadline = time.monotonic() + MOST_SECONDS
    try:
        child = subprocess.Popen(
            [*command, "--parent", str(os.getpid())], env=worker_environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if quiet else None,
        )  # fmt: skip
    except OSError as error:
        return f"`axonn-ext verify` cannot be started: {error}; {_GOES_ON}"
    try:
        while True:
            try:
                return _problem(child.wait(sign_seconds))
            except subprocess.TimeoutExpired:
                alive()
            if time.monotonic() > deadline:
                return f"`axonn-ext verify` had not ended after {MOST_SECONDS:,.0f} s; {_GOES_ON}"
    finally:
        _end(child)


def _problem(status: int) -> str:
    if status == 0:
        return ""
    if status == 1:
        return f"`axonn-ext verify` found wrong kernels or was stopped; {_GOES_ON}"
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    return f"`axonn-ext verify` {how}; {_GOES_ON}"


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
