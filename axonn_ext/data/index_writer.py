"""Writes token files (see `indexed`), under temporary names until they are complete."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from axonn_ext.data.indexed import DTYPES, HEADER, MAGIC, VERSION
from axonn_ext.spec.files.files import open_new
from axonn_ext.spec.files.token_files import TokenFiles

MOST_TOKENS = 2**31 - 1  # per document: the index has lengths in int32
_AT_ONCE = 1 << 20  # entries of the index


def dtype_for(num_tokens: int) -> np.dtype[Any]:
    """Returns the format's smallest dtype for a vocabulary; above u1 as in Megatron."""
    if num_tokens <= 256:
        return np.dtype("u1")
    return np.dtype("<u2" if num_tokens < 65500 else "<i4")


def remove_remains(files: TokenFiles) -> None:
    """Removes temporary files left by killed processes of this host."""
    for path in files.all():
        mine = re.compile(re.escape(f".{path.name}.{_host()}.") + r"(\d{1,9})\.(tmp|len)")
        for name in os.listdir(path.parent):
            found = mine.fullmatch(name)
            if found is not None and not _runs(int(found[1])):
                (path.parent / name).unlink(missing_ok=True)


class IndexedWriter:
    """Writes the files of a corpus; a context manager that removes unfinished files.

    Memory does not grow with the corpus: document lengths are kept in a temporary file.
    """

    def __init__(self, files: TokenFiles, dtype: np.dtype[Any]) -> None:
        self._files, self._dtype = files, dtype
        self._open_files: list[BinaryIO] = []
        self.num_documents = self.num_tokens = 0

    def __enter__(self) -> IndexedWriter:
        remove_remains(self._files)
        self._temporary = {
            path: _beside(path, "tmp")
            for path in (self._files.bin, self._files.json, self._files.idx)
        }
        self._lengths_path = _beside(self._files.idx, "len")
        try:
            self._tokens = self._open(self._temporary[self._files.bin])
            self._lengths = self._open(self._lengths_path)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for path in (*self._temporary.values(), self._lengths_path):
            path.unlink(missing_ok=True)
        for stream in self._open_files:
            try:
                stream.close()
            except OSError:  # the buffer cannot be flushed; the file is removed anyway
                continue

    def add(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Adds tokens and the lengths of the documents that end among them."""
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)

    def finish(self, description: dict[str, Any]) -> None:
        """Writes the index and the description, and gives all files their final names.

        An old .idx is removed first and the new one comes last, so that it always describes the
        tokens next to it. If a file cannot be renamed, the old files get their names back.
        """
        for stream in self._open_files:
            stream.flush()
        self._write_index(self._open(self._temporary[self._files.idx]))
        about = self._open(self._temporary[self._files.json])
        about.write((json.dumps(description, indent=1) + "\n").encode())
        for stream in self._open_files:
            stream.flush()
            os.fsync(stream.fileno())
        with _without_signals():
            self._give_names()

    def _give_names(self) -> None:
        old = {path: _beside(path, "old") for path in reversed(self._temporary)}
        aside: list[Path] = []
        given: list[Path] = []
        try:
            for path, place in old.items():
                if os.path.lexists(path):
                    os.replace(path, place)
                    aside.append(path)
            for path, temporary in self._temporary.items():
                os.replace(temporary, path)
                given.append(path)
        except BaseException:
            for path in reversed(given):
                path.unlink()
            for path in reversed(aside):
                os.replace(old[path], path)
            raise
        for path in aside:
            old[path].unlink(missing_ok=True)

    def _open(self, path: Path) -> BinaryIO:
        stream = open_new(path)
        self._open_files.append(stream)
        return stream

    def _write_index(self, stream: BinaryIO) -> None:
        [code] = [code for code, name in DTYPES.items() if np.dtype(name) == self._dtype]
        count = self.num_documents  # each document is one sequence
        stream.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        with self._lengths_path.open("rb") as lengths:
            while block := lengths.read(4 * _AT_ONCE):
                stream.write(block)
            lengths.seek(0)
            pointer = 0
            while block := lengths.read(4 * _AT_ONCE):
                sizes = np.frombuffer(block, "<i4").astype(np.int64) * self._dtype.itemsize
                ends = pointer + np.cumsum(sizes)
                stream.write((ends - sizes).astype("<i8").tobytes())
                pointer = int(ends[-1])
        for first in range(0, count + 1, _AT_ONCE):
            stream.write(np.arange(first, min(first + _AT_ONCE, count + 1), dtype="<i8").tobytes())


def _host() -> str:
    return socket.gethostname().replace("/", "-")


def _beside(path: Path, ending: str) -> Path:
    """Returns a hidden name next to a file, unique to this process."""
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{ending}")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return process != os.getpid()


@contextmanager
def _without_signals() -> Iterator[None]:
    """Ignores signals that would end the command inside the block: all the work is done.

    Only the main thread can do this, and only it is interrupted by signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
