"""Dispatch to the subcommands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from axonn_ext import settings
from axonn_ext._version import __version__
from axonn_ext.settings import LaunchEnvironment
from axonn_ext.train.errors import TrainingError, UserError, WorkerUserError

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

# Each is a module beside this one, which is imported only when it is asked for: Torch takes seconds
# to load, and `plan` does without it.
COMMANDS = {
    "plan": "find the fastest grid for a model on a machine",
    "train": "train a model",
    "compare": "compare the losses of two runs",
    "bench": "time the ops",
    "tune": "measure a model's matrix products",
    "doctor": "tell what is installed and what will be used",
}

DESCRIPTION = """\
Trains large neural networks with AxoNN's 4D parallel algorithm."""

EPILOG = """\
examples:
  axonn-ext plan --model gpt-80b --gpus 1024 --machine perlmutter --global-batch 2048
  axonn-ext train --nproc 4 --config examples/demo.toml --grid x=2,y=2
  torchrun --nproc-per-node 8 -m axonn_ext train --config examples/demo.toml --grid x=2,y=2,z=2
  axonn-ext compare runs/demo runs/demo-plain
  axonn-ext bench linear --grid 2x2x1
  axonn-ext tune --model gpt2-small --grid 2x2x1
  axonn-ext doctor

`axonn-ext COMMAND --help` tells more. Exit status: 0 done, 1 failed, 2 a mistake in what was asked.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UserError`s, shown like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    here = settings.launch_environment()
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        args, extra = _parser(arguments[:1]).parse_known_args(arguments)
        return int(args.run(args, extra))
    except UserError as error:
        _report(here, "\n".join(f"error: {problem}" for problem in error.problems))
        if here is not None and here.world_size > 1:
            _say_farewell()
        return USER_ERROR
    except WorkerUserError:
        return USER_ERROR
    except TrainingError as error:
        _report(here, f"error: {error}")
        return FAILED
    except KeyboardInterrupt:
        if here is None:  # under a launcher, it is the launcher that says so, once
            _report(here, "interrupted")
        return INTERRUPTED
    except Exception as error:
        _report(here, f"error: {error}" if _lost_peer(error) else traceback.format_exc())
        return FAILED


def _parser(first: Sequence[str]) -> Parser:
    """All commands, by their names; with its options the one that the first argument names."""
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


def _say_farewell() -> None:
    from axonn_ext.train import process  # loads Torch

    here = process.this_process()
    assert here is not None
    process.say_farewell(here)


def _lost_peer(error: Exception) -> bool:
    """Whether another rank's end is all that is wrong here; where this rank was says nothing then.

    Our fused ops and gloo both report it as a RuntimeError, known by its text alone.
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
    """Writes the text to stderr, each line with the rank if there are several, in one piece."""
    prefix = f"[rank {here.rank}] " if here is not None and here.world_size > 1 else ""
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    sys.stderr.flush()
