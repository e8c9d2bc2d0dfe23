"""`axonn-ext tokenize`: turns text into token files, which the trainer reads piece by piece."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from axonn_ext.spec import settings
from axonn_ext.spec.files.token_files import TokenFiles, named_by
from axonn_ext.terminal.arguments import MOST_PROCESSES, new_parser, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.terminal.files import check_writable

NUM_LINES = 10  # of progress if there is no terminal
DESCRIPTION = """\
Encodes text and writes PREFIX.bin (tokens), PREFIX.idx (where documents begin) and PREFIX.json
(vocabulary and sizes). `axonn-ext train --data.text PREFIX` reads them in place, at any size. The
first two have the format of Megatron's indexed datasets. Each text file, and each line of a .jsonl
file, is one document. The output does not depend on the number of processes."""

EPILOG = """\
examples:
  axonn-ext tokenize --text books --out corpora/books
  axonn-ext tokenize --text web.jsonl --field text --vocabulary tokenizer.json --append-id 0 \\
      --out corpora/web
  axonn-ext train --data.text corpora/web --data.order documents
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "tokenize", run, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--text", required=True, metavar="FILE|FOLDER",
        help="text to encode; a folder is read recursively, in sorted order, without hidden files",
    )  # fmt: skip
    parser.add_argument(
        "--field", default="text", metavar="NAME",
        help="field of each .jsonl line that holds the document (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary", default="bytes", metavar="bytes|FILE.json",
        help="vocabulary: bytes, or a JSON file of the tokenizers library (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--append-id", type=whole(0), metavar="ID",
        help="id of a token to append to each document (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=whole(1, MOST_PROCESSES), metavar="N",
        help="number of processes (default: one per core that this process may use)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PREFIX",
        help="path of the token files without .bin, .idx and .json",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="replace existing token files at PREFIX"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError, before any work, for invalid arguments."""
    here = settings.launch_environment()
    if here is not None and here.world_size > 1:
        raise UserError("tokenize starts its own processes; start it without torchrun or srun")
    files = named_by(args.out)
    _check_out(files, overwrite=args.overwrite)
    from axonn_ext.data.tokenizing import TextCorpus, Tokenizing  # takes a while to load

    try:
        tokenizing = Tokenizing(TextCorpus(args.text, args.vocabulary, args.field, args.append_id))
    except ValueError as error:
        raise UserError(str(error)) from None
    _check_apart(tokenizing.files, files)
    console = Console()
    began = time.perf_counter()
    try:
        with _ending_as_interrupted(), _progress(console, tokenizing.num_bytes) as advance:
            workers = args.workers or len(os.sched_getaffinity(0))
            about = tokenizing.write(files, processes=workers, advance=advance)
    except ValueError as error:
        raise UserError(str(error)) from None
    except ChildProcessError as error:
        raise TrainingError(f"{error}; nothing was written") from None
    except OSError as error:
        raise TrainingError(
            f"--out: cannot write {files.prefix}: {error.strerror or error}; nothing was written"
        ) from None
    seconds = time.perf_counter() - began
    say(
        console,
        f"{about['documents']:,} documents, {about['tokens']:,} tokens of {about['vocabulary']}, "
        f"from {_megabytes(tokenizing.num_bytes)} in {seconds:.1f} s, "
        f"{tokenizing.num_bytes / 1e6 / seconds:.1f} MB/s",
    )
    say(console, "written: " + ", ".join(str(file) for file in files.all()))
    return 0


def _check_out(files: TokenFiles, *, overwrite: bool) -> None:
    """Raises UserError for a PREFIX that cannot be written, or would not name the token files."""
    if not files.prefix.name:
        raise UserError(f"--out: expected a PREFIX of names of files, got {files.prefix}")
    if os.path.lexists(files.prefix):
        raise UserError(
            f"--out: {files.prefix} exists, so that --data.text would not mean the token files; "
            "expected another PREFIX"
        )
    found = [file for file in files.all() if os.path.lexists(file)]
    if found and not overwrite:
        raise UserError(f"--out: {found[0]} exists; --overwrite replaces it")
    for file in files.all():
        check_writable("--out", file)


def _check_apart(texts: Sequence[Path], files: TokenFiles) -> None:
    """Raises UserError if a file that will be written is read as well."""
    outputs = {file.resolve() for file in files.all()}
    for text in texts:
        if text.suffix in (".bin", ".idx", ".json") and text.resolve() in outputs:
            raise UserError(f"--out: {text} belongs to --text; expected a PREFIX outside of it")


@contextmanager
def _ending_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP act like Ctrl-C in its body, so that they leave no files either.

    A signal that is ignored stays ignored, which nohup relies on.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    mine = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


@contextmanager
def _progress(console: Console, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal and plain lines elsewhere.

    Yields a callback that takes the number of bytes done.
    """
    if not console.is_terminal:
        yield _Lines(console, num_bytes).advance
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(), TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("tokenize", total=num_bytes)
        yield lambda done: progress.update(task, advance=done)


class _Lines:
    """Prints how much is done, at most NUM_LINES times."""

    def __init__(self, console: Console, num_bytes: int) -> None:
        self._console, self._num_bytes = console, num_bytes
        self._done, self._shown, self._began = 0, 0, time.perf_counter()

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        tenth = self._done * NUM_LINES // self._num_bytes
        if tenth <= self._shown or tenth == NUM_LINES:
            return
        self._shown = tenth
        rate = self._done / (time.perf_counter() - self._began)
        say(
            self._console,
            f"{100 * self._done / self._num_bytes:3.0f} %  {_megabytes(self._done)}, "
            f"{rate / 1e6:.1f} MB/s, {(self._num_bytes - self._done) / rate:,.0f} s left",
        )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
