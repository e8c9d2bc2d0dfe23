"""Runs a function over many items in processes of its own, with the results in order."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 4  # items per process that may be done before the first of them is asked for


def ordered_results(
    open_work: Callable[[], Callable[[Item], Result]], items: Sequence[Item], *, processes: int
) -> Generator[Result, None, None]:
    """Yields the result for each item, in the order of the items.

    open_work: makes the function, once in each process; it and the items are pickled. With one
    process all runs in this one. The processes end when the iterator is closed, and with this one.

    Raises: ValueError as the function raised it, in the order of the items; ChildProcessError for
        a process that has died.
    """
    if processes == 1:
        work = open_work()
        for item in items:
            yield work(item)
        return
    pool = _Pool(open_work, min(processes, len(items)))
    try:
        yield from pool.run(items)
    finally:
        pool.close()


class _Pool:
    def __init__(self, open_work: Callable[[], Any], count: int) -> None:
        # Spawned, not forked, so that no child has another's pipe, or threads of this process.
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, open_work), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process

    def run(self, items: Sequence[Any]) -> Iterator[Any]:
        idle = list(self._processes)
        busy: dict[Connection, int] = {}
        done: dict[int, tuple[bool, Any]] = {}
        sent = wanted = 0
        while wanted < len(items):
            most = min(len(items), wanted + _AHEAD * len(self._processes))
            while idle and sent < most:
                connection = idle.pop()
                self._send(connection, items[sent])
                busy[connection] = sent
                sent += 1
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                done[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)
            while wanted in done:
                fine, result = done.pop(wanted)
                if not fine:
                    raise ValueError(result)
                yield result
                wanted += 1

    def close(self) -> None:
        """Ends the processes at once."""
        for connection, process in self._processes.items():
            process.terminate()
            connection.close()
        for process in self._processes.values():
            process.join()

    def _send(self, connection: Connection, item: Any) -> None:
        try:
            connection.send(item)
        except OSError:
            self._died(connection)

    def _receive(self, connection: Connection) -> tuple[bool, Any]:
        try:
            fine, result = connection.recv()
        except (EOFError, OSError):
            self._died(connection)
        return fine, result

    def _died(self, connection: Connection) -> NoReturn:
        process = self._processes[connection]
        process.join(timeout=5)
        code = process.exitcode
        reason = f"of signal {-code}" if code is not None and code < 0 else f"with status {code}"
        raise ChildProcessError(
            f"a process that was started here has ended {reason}; if memory has run out, fewer "
            "processes need less"
        )


def _serve(connection: Connection, open_work: Callable[[], Callable[[Any], Any]]) -> None:
    """Answers items until the other end is closed, which also happens when that process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    work: Callable[[Any], Any] | None = None
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            work = work or open_work()
            answer = (True, work(item))
        except (ValueError, OSError) as error:
            answer = (False, str(error))
        try:
            connection.send(answer)
        except OSError:
            return
