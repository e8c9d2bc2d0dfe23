"""Starts the processes of a job on this machine, and says how they ended."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from axonn_ext.ranks.launch.limits import allow_open_files
from axonn_ext.spec import settings
from axonn_ext.terminal.errors import OutputClosed, TrainingError, WorkerUserError

# Exit statuses of axonn_ext.cli.main, which prints why, or cannot print any more.
FAILED_STATUS, USER_ERROR_STATUS, READER_GONE_STATUS = 1, 2, 141
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "; SIGKILL often means that memory ran out: see dmesg, or try recompute, "
    "more micro_batches or a larger grid",
    signal.SIGSEGV: "; please report this with the command that was run",
}
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NO_READER = signal.SIGPIPE  # sent by a rank that cannot print; nobody ignores it here
_INTERRUPTED = 128 + signal.SIGINT  # the exit status of a rank
LOOK_SECONDS = 0.1
END_SECONDS = 30.0  # how long a rank may take to end after a signal
GPU_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")  # files that CUDA and ROCm keep open
_Handler = Callable[[int, FrameType | None], Any] | int | None  # of a signal


def launch(
    num_processes: int, arguments: Sequence[str], *, forwarded: Sequence[signal.Signals] = ()
) -> None:
    """Runs `python -m axonn_ext ARGUMENTS` in each of `num_processes` processes until all end.

    They are forks of this process, so that a host reads the files of Python and torch once, not
    once per rank. The processes write to this terminal. When one fails, the others are ended.

    forwarded: signals that are passed on to the processes and do not end the job here; of several
    SIGINTs, only the first.

    Raises:
        WorkerUserError: the processes ended with exit status 2, after printing why.
        TrainingError: one failed or was killed; the message names its rank, pid and signal.
        OutputClosed: nobody reads their output any more; the processes have ended.
        UserError: this machine lets a process open too few files; no process was started.
        KeyboardInterrupt: the user stopped the job; the processes have ended. It has a message if
            SIGINT was passed on, and all have ended with status 0.
    """
    allow_open_files(num_processes, serves=True)
    ranks: list[ForkProcess] = []
    heard: list[int] = []
    passed_on = list(forwarded)  # from now on
    with (
        tempfile.TemporaryDirectory(prefix="axonn_ext_") as folder,  # only this user can enter it
        _hearing(heard, forwarded) as handlers,
    ):
        store = Path(folder) / "store"
        store.touch()
        try:
            _start(ranks, num_processes, arguments, store, handlers)
            failed = _first_failures(ranks, heard, passed_on)
            obeyed = not failed or any(r.exitcode == _INTERRUPTED for r in failed.values())
            if len(passed_on) < len(forwarded) and obeyed:
                raise KeyboardInterrupt(*([] if failed else ["interrupted"]))
            _end(ranks, [signal.SIGTERM], heard)
        except _Ended as ended:
            # All are stopped first, so that none notices and reports that another has ended.
            no_reader = ended.signal == NO_READER  # Python processes ignore it
            sent = [signal.SIGKILL] if no_reader else [ended.signal, signal.SIGCONT]
            _end(ranks, [signal.SIGSTOP, *sent], heard)
            if ended.signal == signal.SIGINT:
                raise KeyboardInterrupt from None
            if no_reader or ended.signal == signal.SIGHUP:  # the terminal is closed
                raise OutputClosed from None
            raise TrainingError(f"the job was ended by {ended.signal.name}") from None
        finally:
            _end(ranks, [signal.SIGKILL], heard)
    if failed:
        raise _failure(failed, num_processes)


class _Ended(Exception):
    """A signal has ended the job."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def _hearing(
    heard: list[int], forwarded: Sequence[signal.Signals]
) -> Iterator[dict[int, _Handler]]:
    """Adds signals to `heard` as they come. Yields the handlers that this process had before.

    A signal that this process ignores, such as SIGHUP under nohup or SIGINT in the background of a
    script, does not end the job, and is not heard unless it is NO_READER or, except for SIGINT,
    forwarded. SIGCHLD is not ignored here, or exit statuses would be lost.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    watched: set[int] = {*ENDING_SIGNALS, NO_READER, *forwarded}
    before = {number: signal.getsignal(number) for number in {*watched, signal.SIGCHLD}}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in watched:
        if before[number] != signal.SIG_IGN or number in {NO_READER, *forwarded} - {signal.SIGINT}:
            signal.signal(number, hear)
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    ranks: list[ForkProcess],
    num_processes: int,
    arguments: Sequence[str],
    store: Path,
    handlers: Mapping[int, _Handler],
) -> None:
    """Starts the processes, and adds them to `ranks`.

    Signals for a new process wait until it has the handlers that this one had.
    """
    job = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": str(store),
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": f"{settings.LAUNCHED_BY_US}{os.getpid()}",
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
    try:
        for rank in range(num_processes):
            place = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = get_context("fork").Process(
                target=_be_rank,
                name=f"rank {rank}",
                args=(arguments, place, handlers, mask, threading.active_count()),
            )
            process.start()
            ranks.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _be_rank(
    arguments: Sequence[str],
    place: Mapping[str, str],
    handlers: Mapping[int, _Handler],
    mask: Iterable[int],
    num_threads: int,
) -> NoReturn:
    """Runs the command in a fork of the launcher, in a new session.

    Its standard input is empty, and it ends without running C++ destructors.

    num_threads: the number of the launcher's threads that Python has started.
    """
    os.setsid()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    settings.take_place(place)
    if not _is_whole(num_threads):
        os.execv(sys.executable, [sys.executable, "-m", "axonn_ext", *arguments])
    sys.argv[1:] = arguments
    runpy.run_module("axonn_ext", run_name="__main__")
    raise AssertionError("the command ends the process")


def _is_whole(num_threads: int) -> bool:
    """Whether this fork can do everything that a new process can.

    It cannot use GPUs if its parent has, nor OpenMP if its parent has a thread pool. OpenBLAS ends
    its threads before a fork. Python's own threads are no obstacle as long as they hold no lock
    that a rank needs; the only one in a launcher keeps the claim of the run's folder.
    """
    try:
        threads = os.listdir(f"/proc/{os.getppid()}/task")
        files = [os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")]
    except OSError:
        return False
    used_gpu = torch.cuda._is_in_bad_fork() or any(driver in files for driver in GPU_DRIVERS)
    return len(threads) <= num_threads and not used_gpu


def _first_failures(
    ranks: Sequence[ForkProcess], heard: list[int], forwarded: list[signal.Signals]
) -> dict[int, ForkProcess]:
    """Waits until one has failed or all have ended; returns those that have failed, by rank.

    Forwards signals in the meantime, but SIGINT only once: removes it from `forwarded`. Raises
    _Ended for one that ends the job.
    """
    while True:
        while heard:
            number = heard.pop(0)
            if number not in forwarded:
                raise _Ended(number)
            for rank in _running(ranks):
                _send(os.kill, rank, number)
            if number == signal.SIGINT:
                forwarded.remove(signal.SIGINT)
        running = _running(ranks)
        failed = {rank: process for rank, process in enumerate(ranks) if process.exitcode}
        if failed or not running:
            return failed
        time.sleep(LOOK_SECONDS)


def _end(ranks: Sequence[ForkProcess], signals: Sequence[int], heard: list[int]) -> None:
    """Sends each signal to all running ranks, and to the processes they have started.

    Waits until they have ended, for at most END_SECONDS, or until the user sends another signal.
    """
    heard.clear()
    running = _running(ranks)  # none is reaped below, so no pid can be reused by then
    for number in signals:
        for rank in running:
            if not _send(os.killpg, rank, number):  # it is about to make its group
                _send(os.kill, rank, number)
    deadline = time.monotonic() + END_SECONDS
    while _running(ranks) and not heard and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS / 10)


def _send(kill: Callable[[int, int], None], rank: ForkProcess, number: int) -> bool:
    assert rank.pid is not None
    try:
        kill(rank.pid, number)
    except ProcessLookupError:
        return False
    return True


def _running(ranks: Sequence[ForkProcess]) -> list[ForkProcess]:
    return [rank for rank in ranks if rank.exitcode is None]


def _failure(failed: Mapping[int, ForkProcess], num_processes: int) -> Exception:
    """Returns the exception for the failure that is considered the first."""
    statuses = {rank: process.exitcode or 0 for rank, process in failed.items()}
    if USER_ERROR_STATUS in statuses.values():
        return WorkerUserError()
    if READER_GONE_STATUS in statuses.values():
        return OutputClosed()
    rank = min(statuses, key=lambda rank: (_blame(statuses[rank]), rank))
    status, hint = statuses[rank], ""
    if status < 0:
        known = -status in [*signal.Signals]
        how = f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"
        hint = SIGNAL_HINTS.get(-status, "")
    else:
        how = f"failed with exit status {status}"
        if status == FAILED_STATUS:
            hint = f"; its message is above, after [rank {rank}]"
    others = num_processes - 1
    ended = f"; the other {others} ended, too" if others else ""
    return TrainingError(f"rank {rank} (pid {failed[rank].pid}) {how}{ended}{hint}")


def _blame(status: int) -> int:
    """Returns a sort key: the failure with the smallest one is considered the first.

    The keys are 0 for a signal, 1 for an error and 2 for a process that the job itself ended. A
    process that is killed from outside makes its peers fail, sometimes before the launcher looks,
    so a signal comes before an error. SIGABRT counts as an error, since C++ ends with it on errors.
    """
    if status == -signal.SIGTERM:
        return 2
    return 0 if status < 0 and status != -signal.SIGABRT else 1
