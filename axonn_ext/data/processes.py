"""Runs a function over many items in separate processes, with the results in order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
# The program of each process; its arguments are a file descriptor and the module search path.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from axonn_ext.data.processes import serve; serve(int(sys.argv[1]))"
)
_AHEAD = 4  # items per process that may be finished ahead of the consumer


def ordered_results(
    open_work: Callable[[], Callable[[Item], Result]], items: Sequence[Item], *, processes: int
) -> Generator[Result, None, None]:
    """Yields the result for each item, in the order of the items.

    open_work: makes the function, once in each process; it and the items are pickled. With one
    process or one item, everything runs in this process. The processes end when the iterator is
    closed, or when this process ends.

    Raises: ValueError as raised by the function, in the order of the items; ChildProcessError if a
        process died.
    """
    processes = min(processes, len(items))
    if processes <= 1:
        work = open_work()
        for item in items:
            yield work(item)
        return
    pool = _Pool(open_work, processes)
    try:
        yield from pool.run(items)
    finally:
        pool.close()


class _Pool:
    """Freshly started processes, which inherit neither pipes of the others nor threads."""

    def __init__(self, open_work: Callable[[], Any], count: int) -> None:
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(count):
                self._start(open_work)
        except BaseException:
            self.close()
            raise

    def _start(self, open_work: Callable[[], Any]) -> None:
        ours, theirs = Pipe()
        with theirs:
            # In a separate session: Ctrl-C should reach only this process, which ends the others.
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._processes[ours] = process
        self._send(ours, open_work)

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
            process.wait()

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
        code = self._processes[connection].wait()  # only its exit closes its end
        reason = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise ChildProcessError(
            f"a process that was started here has ended {reason}; if memory has run out, fewer "
            "processes need less"
        )


def serve(descriptor: int) -> None:
    """Processes items until the other end is closed, which also happens when that process ends."""
    connection: Connection = Connection(descriptor)
    try:
        open_work = connection.recv()
        work: Callable[[Any], Any] | None = None
        while True:
            item = connection.recv()
            try:
                work = work or open_work()
                answer = (True, work(item))
            except (ValueError, OSError) as error:
                answer = (False, str(error))
            connection.send(answer)
    except (EOFError, OSError):
        return
