"""Starts the processes of a job on this machine, as torchrun would, and says how they ended."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from axonn_ext.launch import rendezvous
from axonn_ext.launch.limits import allow_open_files
from axonn_ext.settings import LAUNCHED_BY_US
from axonn_ext.terminal.errors import OutputClosed, TrainingError, WorkerUserError

FAILED_STATUS, USER_ERROR_STATUS = 1, 2  # exit statuses of axonn_ext.cli.main, which prints why
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "; SIGKILL often means that memory ran out: see dmesg, or try recompute, "
    "more micro_batches or a larger grid",
    signal.SIGSEGV: "; please report this with the command that was run",
}
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")


def launch(
    num_processes: int, arguments: Sequence[str], *, forwarded: Sequence[signal.Signals] = ()
) -> None:
    """Runs `python -m axonn_ext ARGUMENTS` in each of `num_processes` processes until all end.

    The processes write to this terminal. When one fails, the others are ended. forwarded: signals
    that the processes get, and that do not end the job otherwise.

    Raises:
        WorkerUserError: the processes ended with exit status 2, after printing why.
        TrainingError: one failed or was killed; the message names its rank, pid and signal.
        OutputClosed: nobody reads their output any more; the processes have ended.
        UserError: this machine lets a process open too few files; no process was started.
        KeyboardInterrupt: the user stopped the job; the processes have ended.
    """
    allow_open_files(num_processes, serves=True)
    # The agent logs each process that it ends. The error that is raised here says what matters.
    for name in AGENT_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous.register()
    with tempfile.TemporaryDirectory(prefix="axonn_ext_") as folder:  # for this user alone
        store = Path(folder) / "store"
        store.touch()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=f"{LAUNCHED_BY_US}{os.getpid()}-{uuid.uuid4().hex}",
            rdzv_backend=rendezvous.BACKEND,
            rdzv_endpoint=str(store),
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(
                number.name for number in ENDING_SIGNALS if number not in forwarded
            ),
        )
        try:
            with _forwarding(forwarded):
                elastic_launch(config, sys.executable)("-m", "axonn_ext", *arguments)
        except ChildFailedError as error:
            raise _failure(error.failures) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            if error.sigval == signal.SIGHUP:  # sent by a rank that cannot print, or the terminal
                raise OutputClosed from None
            raise TrainingError(f"the job was ended by {error.sigval.name}") from None


@contextmanager
def _forwarding(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Passes these signals on to the processes that this one has started.

    One that this process has ignored so far is meant to end no process: it is passed on only to
    those that listen to it by now.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            # Those that the main thread has started, whose number is that of the process.
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:
            children = []
        if before[number] == signal.SIG_IGN:
            children = [child for child in children if _handles(child, number)]
        elif not children:  # the job ends, as it would without this
            raise SignalException("nothing is started", sigval=signal.Signals(number))
        for child in children:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(int(child), number)

    before: dict[int, Any] = {number: signal.signal(number, pass_on) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handles(process: str, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _failure(failures: Mapping[int, ProcessFailure]) -> Exception:
    """Returns the exception for the failure that came first."""
    if any(failure.exitcode == USER_ERROR_STATUS for failure in failures.values()):
        return WorkerUserError()
    rank = min(failures, key=lambda rank: (_blame(failures[rank]), failures[rank].timestamp, rank))
    failure = failures[rank]
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
        hint = SIGNAL_HINTS.get(-failure.exitcode, "")
    else:
        how = f"failed with exit status {failure.exitcode}"
        hint = ""
        if failure.exitcode == FAILED_STATUS:
            hint = f"; its message is above, after [rank {rank}]"
    others = len(failures) - 1
    ended = f"; the other {others} were ended" if others else ""
    return TrainingError(f"rank {rank} (pid {failure.pid}) {how}{ended}{hint}")


def _blame(failure: ProcessFailure) -> int:
    """Returns a sort key: the failure with the smallest one is taken for the first.

    The keys are 0 for a signal, 1 for an error and 2 for a process that the job itself ended. A
    process that is killed from outside makes its peers fail, sometimes before the agent looks, so a
    signal comes before an error. SIGABRT counts as an error, since C++ ends with it on errors.
    """
    if failure.exitcode == -signal.SIGTERM:
        return 2
    return 0 if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT else 1
