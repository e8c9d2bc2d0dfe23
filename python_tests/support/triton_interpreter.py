"""A process that runs Triton's kernels in the interpreter, and ranks forked from it.

The interpreter must be chosen before importing triton, so it gets its own process. It is not
thread-safe, so ranks are processes that share memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import random
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from limits import HANG_SECONDS
from worker_pool import serve


class Interpreter:
    """`run(function, *args)` calls a module-level function there and returns its result."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            self._process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self._process.is_alive():  # an earlier test ended it
            self._start()
        self._pipe.send((function, args))
        try:
            if not self._pipe.poll(HANG_SECONDS):
                raise AssertionError(f"{function.__name__}: no answer in {HANG_SECONDS} s")
            ok, value = self._pipe.recv()
        except (AssertionError, EOFError) as error:
            self.close()
            raise AssertionError(f"the interpreter's process: {error!r}") from error
        assert ok, value
        return value

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)  # ranks are forked, so there must be no thread pool
    serve(pipe)


def shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in shared memory, at the same address in all processes forked later."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, (count + 1) * dtype.itemsize)  # mmap and frombuffer reject empty sizes
    return torch.frombuffer(memory, dtype=dtype)[:count].view(shape)


def run_ranks(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """Calls `function(rank)` in forks of this process; returns the results by rank."""
    readers, processes = [], []
    for rank in range(world_size):
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            _run_rank(rank, function, writer)
        os.close(writer)
        readers.append(reader)
        processes.append(process)
    try:
        answers = [_read(reader) for reader in readers]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 9)
            os.waitpid(process, 0)
    errors = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
    assert not errors, "\n".join(errors)
    return [value for _, value in answers]


def _run_rank(rank: int, function: Callable[[int], Any], writer: int) -> None:
    """Runs a rank and exits the process, without closing resources of the parent."""
    signal.alarm(int(HANG_SECONDS))  # it must not wait for its peers longer than its parent waits
    try:
        answer = pickle.dumps((True, function(rank)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(answer)
    os._exit(0)


def _read(reader: int) -> tuple[bool, Any]:
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    return pickle.loads(answer) if answer else (False, "the process ended")


def dawdle(seed: int) -> None:
    """Sleeps for up to 20 ms, so that ranks reach the next step in a different order each time."""
    time.sleep(random.Random(seed).random() * 0.02)
