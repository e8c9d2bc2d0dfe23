"""Ranks for tests: processes that start once per world size and run one function after another."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import rank_start
from limits import HANG_SECONDS

PEERS_SECONDS = 120.0  # in this time ranks learn that a peer has failed, on a busy machine


class WorkerError(AssertionError):
    """A function failed on some ranks; the message contains their tracebacks."""


class WorkerPool:
    """`world_size` processes joined in one gloo world, or an NCCL world for device="cuda".

    `run(function, *args)` calls `function(*args)` on every rank and returns the results by rank.
    Functions must be importable (module level); results are pickled.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        context = _context_of(device)
        # This process hosts the ranks' store, so that no rank has to find a free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_worlds = 1
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_start.start_rank,
                args=(rank, world_size, self._store.port, theirs, device, dict(os.environ)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.answers: dict[int, Any] = {}  # by rank, even if other ranks failed
        self._collect(HANG_SECONDS)

    @property
    def usable(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = HANG_SECONDS
    ) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(timeout_s)

    def renew_groups(self) -> None:
        """Joins the ranks in a new world, which ends the threads of old groups: gloo's poll."""
        world = self._num_worlds
        self._num_worlds += 1
        self.run(_renew_groups, self._store.port, world)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _collect(self, timeout_s: float) -> list[Any]:
        results = self.answers = {}
        errors: list[str] = []
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while pending:
            ready = wait(list(pending), timeout=timeout_s)
            if not ready:
                errors.append(f"ranks {sorted(pending.values())} gave no answer in {timeout_s} s")
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process ended"
                if ok:
                    results[rank] = value
                else:
                    errors.append(f"rank {rank}: {value}")
                    timeout_s = min(timeout_s, PEERS_SECONDS)  # they may wait in vain
        if errors:
            self.close()  # ranks may be out of step: the next test gets a new pool
            raise WorkerError("\n".join(errors))
        return [results[rank] for rank in range(self.world_size)]


def _context_of(device: str) -> BaseContext:
    """How ranks start: on CPUs, as forks of a process that has only imported torch.

    On GPUs they are not forked, as the CUDA runtime does not survive a fork.
    """
    if device == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    return context


@contextlib.contextmanager
def pools_of_module(
    pools: dict[int, WorkerPool], start: Callable[[int], WorkerPool] = WorkerPool
) -> Iterator[Callable[[int], WorkerPool]]:
    """Yields `get(world_size)`, which returns one of `pools`, started if missing or failed.

    At the end, the pools that were used get new groups.
    """
    used: set[int] = set()

    def get(world_size: int) -> WorkerPool:
        used.add(world_size)
        if world_size in pools and not pools[world_size].usable:
            pools.pop(world_size).close()
        if world_size not in pools:
            pools[world_size] = start(world_size)
        return pools[world_size]

    yield get
    for world_size in used:
        left = pools.get(world_size)  # None if it could not be started
        if left is not None and left.usable:
            left.renew_groups()


def serve(pipe: Any) -> None:
    """Calls functions from the pipe, and sends back (True, result) or (False, traceback)."""
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def serve_rank(rank: int, world_size: int, port: int, pipe: Connection, device: str) -> None:
    """Joins world number 0, and calls functions from the pipe until it is closed."""
    import torch

    from axonn_ext.spec import settings

    torch.set_num_threads(1)
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        if world_size > num_gpus:
            settings.let_ranks_share_gpus(rank)
        torch.cuda.set_device(rank % num_gpus)
    _join("nccl" if device == "cuda" else "gloo", rank, world_size, port, world=0)
    pipe.send((True, None))
    serve(pipe)


def _join(backend: str, rank: int, world_size: int, port: int, *, world: int) -> None:
    """Joins the world of this number; a prefix in the store keeps worlds apart."""
    store = dist.PrefixStore(f"world{world}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _renew_groups(port: int, world: int) -> None:
    from grids import grid_of

    backend, rank, world_size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    grid_of.cache_clear()
    dist.destroy_process_group()
    _join(backend, rank, world_size, port, world=world)
