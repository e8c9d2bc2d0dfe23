"""Runs the subcommands and turns their errors into messages."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from axonn_ext._version import __version__
from axonn_ext.cli import streams
from axonn_ext.ranks.launch import threads
from axonn_ext.spec import settings
from axonn_ext.spec.files.errors import hint, printable
from axonn_ext.spec.settings import LaunchEnvironment, SettingsError
from axonn_ext.terminal.errors import (
    MeetingError,
    OutputClosed,
    TrainingError,
    UserError,
    WorkerUserError,
)

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
FAREWELL_SECONDS = 5.0
_TIMEOUT = "(AXONN_TIMEOUT_SECONDS)"  # `train` has reports that say where the rank waited
MOST_SHOWN = 600  # the most characters per line of a message; names may have thousands
# Each command is a module next to this one. It is imported only when it is run, since Torch takes
# seconds to load, and `plan` does not need it.
COMMANDS = {
    "plan": "predict the fastest grid for a model on a machine",
    "machine": "turn nccl-tests logs into a machine file for plan",
    "tokenize": "encode text into token files for training",
    "train": "train a language model on a grid of processes",
    "finetune": "fine-tune a Hugging Face model, fully or with LoRA",
    "compare": "compare the losses of two runs",
    "generate": "continue prompts with a Hugging Face model",
    "evaluate": "compute a model's loss on a text, or its scores in lm-evaluation-harness",
    "memorize": "measure how much of its training text a model repeats word for word",
    "checkpoint": "list, check, export and reshard checkpoints",
    "bench": "time ops, training, pipelines and links",
    "tune": "find the fastest kernels for a model's matrix products",
    "verify": "check the GPU kernels on this machine and remember which are correct",
    "doctor": "report what is installed, what will be used and what is missing",
}

DESCRIPTION = """\
Trains large neural networks with AxoNN's 4D parallel algorithm."""

EPILOG = """\
examples:
  axonn-ext plan --model gpt-80b --gpus 1024 --machine perlmutter --global-batch 2048
  axonn-ext tokenize --text books --vocabulary tokenizer.json --out corpora/books
  axonn-ext train --nproc 4 --config examples/demo.toml --grid x=2,y=2
  torchrun --nproc-per-node 8 -m axonn_ext train --config examples/demo.toml --grid x=2,y=2,z=2
  axonn-ext compare runs/demo runs/demo-plain
  axonn-ext finetune --model my-model --data examples.jsonl --grid x=2 --lora 16
  axonn-ext generate --model my-model --prompt "Once upon" --grid x=2
  axonn-ext evaluate my-model --text held-out.txt --grid x=2
  axonn-ext memorize --out runs/memorize
  axonn-ext checkpoint list runs/demo
  axonn-ext bench linear --grid 2x2x1
  axonn-ext tune --model gpt2-small --grid 2x2x1
  axonn-ext verify
  axonn-ext doctor

Run `axonn-ext COMMAND --help` for the options of a command.
Exit status: 0 done, 1 failed, 2 a mistake in the request.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError`s, which are shown like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Raises an error if a help text cannot be written, which argparse would ignore."""
        if message:
            (file or sys.stderr).write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    streams.prepare()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()  # if this fails here, we can print a message
    except BrokenPipeError:
        streams.drop(sys.stdout)
        return streams.READER_GONE
    except OSError as error:
        text = _of_the_machine(error)
        streams.drop(sys.stdout)
        _report(None, f"error: {text}")
        return FAILED


def _run(arguments: list[str]) -> int:
    """Runs one command; the caller handles errors of standard output."""
    here, parent = None, os.getppid()
    try:
        here = settings.launch_environment()
        if here is not None and here.by_agent:
            from axonn_ext.ranks.launch.parent import (
                end_with,  # loads ctypes, which others do not need
            )

            end_with(parent, launcher=here.launcher)
        bad_settings = _check_settings(arguments)
        args, extra = _parser(arguments[:1]).parse_known_args(arguments)
        args.bad_settings = bad_settings
        return int(args.run(args, extra))
    except SettingsError as error:
        return _refuse(here, list(error.problems.values()))
    except MeetingError as error:
        _report(here, f"error: {error}")
        return USER_ERROR
    except UserError as error:
        return _refuse(here, error.problems)
    except WorkerUserError:
        return USER_ERROR
    except TrainingError as error:
        _report(here, f"error: {error}")
        return FAILED
    except OutputClosed:
        return streams.READER_GONE
    except BrokenPipeError:
        if here is not None and here.by_us:
            _end_the_job(parent)
        raise
    except KeyboardInterrupt as error:
        if here is None:  # under a launcher, only the launcher says so
            _report(here, str(error) or "interrupted")
        return INTERRUPTED
    except ImportError as error:
        # `kernels.extension` raises it for our own parts, with a message that says what to do.
        ours = (error.name or "").startswith("axonn_ext._")
        _report(here, f"error: {error}" if ours else traceback.format_exc())
        return FAILED
    except (MemoryError, OSError) as error:
        _report(here, f"error: {_of_the_machine(error)}")
        return FAILED
    except Exception as error:
        if threads.ran_out(error):
            _report(here, f"error: {threads.describe_limit()}")
            return FAILED
        known = _lost_peer(error) or (arguments[:1] == ["train"] and _TIMEOUT in str(error))
        _report(here, f"error: {error}" if known else traceback.format_exc())
        return FAILED


def _check_settings(arguments: list[str]) -> dict[str, str]:
    """Raises SettingsError for invalid variables.

    For doctor, it returns the problems instead, and defaults replace these variables.
    """
    try:
        settings.load()
    except SettingsError as error:
        if arguments[:1] != ["doctor"]:
            raise
        settings.set_aside(error.problems)
        return error.problems
    return {}


def end_process(status: int) -> NoReturn:
    """Ends this process with the exit status of `main`.

    If there are several ranks, a failed one ends at once: c10d's destructors would wait for peers
    that may never answer.
    """
    try:
        here = settings.launch_environment()
    except SettingsError:
        here = None
    if status != 0 and here is not None and here.world_size > 1:
        os._exit(status)
    sys.exit(status)


def _refuse(here: LaunchEnvironment | None, problems: Sequence[str]) -> int:
    """Reports mistakes; what rank 0 also reports is reported by the first rank of a host only."""
    text = "\n".join(f"error: {problem}" for problem in problems)
    here = here and settings.launch_environment()  # with the rank from --rank-order
    others = here is not None and here.world_size > 1
    at_once = here is None or here.rank == 0 or here.local_rank == 0
    if at_once:
        _report(here, text)
    if others and not _say_farewell(text) and not at_once:
        _report(here, text)
    return USER_ERROR


def _end_the_job(launcher: int) -> None:
    """Asks the launcher to end the whole job, because nobody reads this rank's output any more.

    Otherwise, the other ranks would complain that this one has ended.
    """
    if launcher == 1 or os.getppid() != launcher:
        return  # the launcher has ended, and the new parent of this process is not ours
    os.kill(launcher, signal.SIGPIPE)  # not SIGHUP, which is ignored behind nohup
    time.sleep(FAREWELL_SECONDS)  # the launcher ends this process in this time


def _of_the_machine(error: MemoryError | OSError) -> str:
    """Says in one line what the machine refused."""
    if isinstance(error, MemoryError):
        return f"memory ran out{f': {error}' if str(error) else ''}"
    if error.errno == errno.EAGAIN:  # of fork
        return threads.describe_limit()
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    # Errors about files that we write already name the file.
    is_stdout = error.errno == errno.ENOSPC and _stdout_is_full()
    return f"{error.strerror or error}{' (standard output)' if is_stdout else ''}"


def _stdout_is_full() -> bool:
    """Whether not even a newline can be written to standard output; drops unwritten output."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return False  # nobody reads the output
    except OSError:
        streams.drop(sys.stdout)
        return True
    return False


def _parser(first: Sequence[str]) -> Parser:
    """Returns a parser with the names of all commands, and the options of the named one."""
    for name in first:
        if not (name.startswith("-") or name in COMMANDS):
            raise UserError(f"unknown command {name}{hint(name, COMMANDS)} (see axonn-ext --help)")
    parser = Parser(
        prog="axonn-ext", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"axonn-ext {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, summary in COMMANDS.items():
        if name in first:
            import_module(f"axonn_ext.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _say_farewell(report: str) -> bool:
    """Tells the other ranks that this one stops; returns whether rank 0 has the same report."""
    try:
        from axonn_ext.ranks.launch import process  # loads Torch

        here = process.this_process()
    except SettingsError:
        return False  # these settings let no process meet another
    assert here is not None
    return process.say_farewell(here, report)


def _lost_peer(error: Exception) -> bool:
    """Whether this error only means that another rank has ended, so its traceback does not help.

    Our fused ops and gloo both raise a RuntimeError for this; only its text identifies it.
    """
    signs = (
        "which has died",
        "which has left the group",
        "which failed; see the error",
        "Connection closed by peer",
        "Connection reset by peer",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _report(here: LaunchEnvironment | None, text: str) -> None:
    """Writes the text to stderr at once; if there are several ranks, lines begin with the rank."""
    here = here and settings.launch_environment()
    prefix = f"[rank {here.rank}] " if here is not None and here.world_size > 1 else ""
    streams.say("".join(f"{prefix}{_shorten(line)}\n" for line in printable(text).splitlines()))


def _shorten(line: str) -> str:
    """Returns the line, without its middle if it is too long to read."""
    if len(line) <= MOST_SHOWN:
        return line
    return f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
