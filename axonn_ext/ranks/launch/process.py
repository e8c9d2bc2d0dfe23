"""The place of this process in its job, the rendezvous of all ranks, and the end of the job."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import (
    DistError,
    DistNetworkError,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.rendezvous import rendezvous

from axonn_ext.ranks import meeting
from axonn_ext.ranks.launch import threads
from axonn_ext.ranks.launch.attempt import name_of_start
from axonn_ext.ranks.launch.limits import allow_open_files
from axonn_ext.ranks.launch.network import advice, check_connections
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import comes
from axonn_ext.spec import settings
from axonn_ext.terminal.errors import MeetingError, TrainingError, UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# A rank that found a mistake waits this long for peers that are still starting. torchrun ends the
# job at the first failure; without the wait, it would do so before the peers report theirs.
FAREWELL_SECONDS = 5.0
_MEETING = "checked"
_REPORT = "report"


def this_process() -> Process | None:
    """Returns the place that torchrun or Slurm gave this process; None if neither started it.

    Raises the errors of `Process.of`.
    """
    launch = settings.launch_environment()
    return None if launch is None else Process.of(launch)


def open_store(process: Process, seconds: float | None = None) -> Store:
    """Opens the store in which all ranks meet, or a new one for a single process.

    seconds: how long to wait for the other ranks; default: as long as for a peer inside an op.

    Raises: MeetingError if the environment does not say where the store is, or if the ranks cannot
        connect to it.
    """
    launch = settings.launch_environment()
    by_torchrun = launch is not None and launch.by_agent and not launch.by_us
    allow_open_files(
        process.world_size, serves=process.rank == 0, agent=os.getppid() if by_torchrun else None
    )
    if process.world_size == 1:
        return HashStore()
    try:
        timeout = timedelta(seconds=seconds) if seconds is not None else _patience()
        store = _shared_store(process, timeout)
        ours = PrefixStore("axonn_ext", store)
        name = name_of_start(ours, process, timeout.total_seconds())
    except TimeoutError as error:
        raise MeetingError(
            f"cannot meet the other ranks: {error} after {timeout.total_seconds():g} s "
            "(AXONN_TIMEOUT_SECONDS)"
        ) from None
    except (ValueError, DistError) as error:
        raise MeetingError(f"cannot meet the other ranks: {_first_line(error)}") from None
    return PrefixStore(name, ours)


def _shared_store(process: Process, timeout: timedelta) -> Store:
    """Opens the file that `axonn-ext` made for its processes, or the store at MASTER_ADDR.

    The latter is served by torchrun, or else by rank 0.
    """
    launch = settings.launch_environment()
    if launch is None or not launch.master_addr:
        raise ValueError("MASTER_ADDR must be the host that serves the store, but is not set")
    if launch.store_file:
        store = FileStore(launch.store_file)
        store.set_timeout(timeout)
        return store
    host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
    url = f"tcp://{host}:{launch.master_port}"
    store, _, _ = next(rendezvous(url, process.rank, process.world_size, timeout=timeout))
    return store  # type: ignore[no-any-return, unused-ignore]


def say_farewell(process: Process, report: str) -> bool:
    """Tells the peers that this rank stops, and waits a little for their own reports.

    Returns whether rank 0, which shows its report first, has the same one.
    """
    deadline, is_known = time.monotonic() + FAREWELL_SECONDS, False
    # Names of files may hold bytes that are no text.
    said = hashlib.sha256(report.encode(errors="surrogateescape")).hexdigest()
    # If nobody serves the store, c10d would print long errors. Rank 0 may serve it itself.
    if process.rank != 0 and not _is_served(deadline):
        return False
    try:
        store = open_store(process, FAREWELL_SECONDS)
        if process.rank == 0:
            store.set(_REPORT, said)
        patience = timedelta(seconds=max(0.05, deadline - time.monotonic()))
        _meet(store, process, None, patience)
        is_known = store.check([_REPORT]) and store.get(_REPORT).decode() == said
        # Rank 0 may serve the store, so it leaves last.
        here = store.add("left", 1)
        while process.rank == 0 and here < process.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            here = store.add("left", 0)
    except (DistError, UserError, TrainingError, meeting.RanksMissing):
        pass  # the peer that served the store has ended already, or there is no store
    return is_known


def _is_served(deadline: float) -> bool:
    """Whether something listens at the address of the store before the deadline."""
    launch = settings.launch_environment()
    assert launch is not None
    if launch.store_file:
        return True
    while True:
        try:
            address = (launch.master_addr, launch.master_port)
            socket.create_connection(address, timeout=FAREWELL_SECONDS).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True


def meet(store: Store, process: Process, values: Callable[[], Mapping[str, str]] = dict) -> None:
    """Waits until every rank has passed its checks, and compares values that must be equal.

    values: returns them, by names that a message can show; versions and settings are added. It is
        called only if there are several ranks.

    Raises: UserError, on every rank, naming the values that differ and the ranks that have them;
        UserError if another rank has not passed its checks, or does not come.
    """
    if process.world_size == 1:
        return
    with checking(process, store):
        shared = {**values(), **meeting.job_values()}
    with _for_the_user():
        _meet(store, process, shared, _patience())


@contextmanager
def _for_the_user() -> Iterator[None]:
    """Turns the errors of a meeting into those of a command."""
    try:
        yield
    except meeting.RanksDiffer as error:
        raise UserError(*error.problems) from None
    except meeting.RanksFailed as error:
        raise UserError(f"stopping, because of the mistake that {error.ranks} reports") from None
    except meeting.RanksMissing as error:
        raise MeetingError(f"cannot meet the other ranks: {error}") from None


def plan_values(command: str, plan: DataclassInstance) -> dict[str, str]:
    """Returns the values of a command whose plan must be equal on all ranks, for `meet`."""
    values = {key.name: str(getattr(plan, key.name)) for key in dataclasses.fields(plan)}
    return {"the command": command, **values}


@contextmanager
def checking(process: Process | None, store: Store | None) -> Iterator[None]:
    """Must enclose checks between `open_store` and `meet`: tells waiting peers of a mistake.

    store: None if it is not open yet; then `say_farewell` tells them.
    """
    try:
        yield
    except UserError:
        if process is not None and store is not None:
            with suppress(DistError, TrainingError, meeting.RanksMissing):
                _meet(store, process, None, timedelta(seconds=FAREWELL_SECONDS))
        raise


def _meet(
    store: Store, process: Process, values: Mapping[str, str] | None, patience: timedelta
) -> None:
    here = PrefixStore(_MEETING, store)
    with _store_needed():
        meeting.meet(here, process.rank, range(process.world_size), values, patience=patience)


def settled_by_rank_0(
    store: Store, process: Process, settle: Callable[[], str], *, topic: str
) -> str:
    """Returns, on every rank, rank 0's result of `settle`, because files differ between hosts.

    topic: a name that no other call in the job uses.

    Raises: UserError if rank 0 has raised one.
    """
    key = f"settled/{topic}"
    if process.rank == 0:
        try:
            text = settle()
        except UserError:
            store.set(key, "")
            raise
        store.set(key, json.dumps(text))  # JSON can hold a path that is not UTF-8
        return text
    with _store_needed():
        if not comes(store, [key], _patience()):
            raise _no_word_of("rank 0")
    said = store.get(key)
    if not said:
        raise UserError("stopping, because of the mistake that rank 0 reports")
    return str(json.loads(said))


def once_per_host(
    store: Store, process: Process, work: Callable[[Callable[[], None]], None], *, topic: str
) -> None:
    """Calls `work` in the first process of each host; all processes return when all hosts are done.

    The number of store operations per rank does not depend on the number of ranks.

    work: may take longer than AXONN_TIMEOUT_SECONDS if it calls its argument more often than that,
        which tells the waiting ranks that this process is alive
    topic: a name that no other call in the job uses

    Raises: MeetingError if hosts are not done and none gives a sign of life for
        AXONN_TIMEOUT_SECONDS.
    """
    signs, finished, all_done = f"{topic}/signs", f"{topic}/ranks", f"{topic}/all"

    def alive() -> None:
        store.add(signs, 1)

    with _store_needed():
        if process.is_first_of_host:
            alive()
            work(alive)
            store.set(f"{topic}/done/{process.rank}", "")
            if store.add(finished, process.local_world_size) == process.world_size:
                store.set(all_done, "")
        seen = 0
        while not comes(store, [all_done], _patience()):
            if (now := store.add(signs, 0)) == seen:
                firsts = range(0, process.world_size, process.local_world_size)
                done = PrefixStore(f"{topic}/done", store)
                raise _no_word_of(meeting.name_missing(done, process.rank, firsts))
            seen = now


@contextmanager
def process_group(process: Process, store: Store, device: str = "cpu") -> Iterator[None]:
    """Initialises torch.distributed for tensors on "cpu" or "cuda", and destroys it at the end.

    On GPUs, the GPU of this rank becomes the current one. After a failure, the process group is not
    destroyed unless there is only this process, because peers may never answer.

    Raises: MeetingError if ranks cannot connect to each other; UserError if ranks that meet inside
        differ, or one does not come.
    """
    settings.prepare_connections()
    if process.world_size > 1:
        with _store_needed():
            check_connections(store, process)
    if device == "cuda":
        with _store_needed():
            from axonn_ext.ranks.launch.gpus import take_gpu

            take_gpu(store, process)
    try:
        with _store_needed():
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=PrefixStore("world", store),
                rank=process.rank,
                world_size=process.world_size,
                timeout=timedelta(seconds=settings.load().timeout_seconds),
            )
        assert dist.group.WORLD is not None
        meeting.connect(dist.group.WORLD)
    except RuntimeError as error:
        if device == "cuda" or threads.ran_out(error):
            raise
        raise MeetingError(
            f"rank {process.rank} on host {socket.gethostname()} cannot connect to the other "
            f"ranks: {_first_line(error)}; {advice()}"
        ) from None
    try:
        with _for_the_user():
            yield
    except BaseException:
        if process.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def set_threads(process: Process, threads: int) -> int:
    """Sets and returns the number of threads; 0 means this rank's share of the host's cores."""
    if not threads:
        threads = max(1, len(os.sched_getaffinity(0)) // process.local_world_size)
    torch.set_num_threads(threads)
    return threads


@contextmanager
def _store_needed() -> Iterator[None]:
    """Raises TrainingError if the process that serves the store ends inside."""
    try:
        yield
    except DistNetworkError as error:
        raise TrainingError(f"lost the other ranks: {_first_line(error)}") from None


def _patience() -> timedelta:
    return timedelta(seconds=settings.load().timeout_seconds)


def _no_word_of(who: str) -> MeetingError:
    seconds = f"{settings.load().timeout_seconds:g} s (AXONN_TIMEOUT_SECONDS)"
    return MeetingError(f"cannot meet the other ranks: no word of {who} after {seconds}")


def _first_line(error: Exception) -> str:
    """Returns the first line of the message, below which c10d puts a C++ stack trace."""
    return str(error).partition("\n")[0]
