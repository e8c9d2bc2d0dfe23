"""Dispatch to the subcommands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import axonn_ext
from axonn_ext.cli import bench, compare, doctor, train, tune
from axonn_ext.train import process
from axonn_ext.train.errors import TrainingError, UserError, WorkerUserError
from axonn_ext.train.process import Process

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

DESCRIPTION = """\
Trains large neural networks with AxoNN's 4D parallel algorithm."""

EPILOG = """\
examples:
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
    here = process.this_process()
    try:
        args, extra = _parser().parse_known_args(argv)
        return int(args.run(args, extra))
    except UserError as error:
        _report(here, "\n".join(f"error: {problem}" for problem in error.problems))
        if here is not None and here.world_size > 1:
            process.say_farewell(here)
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


def _parser() -> Parser:
    parser = Parser(
        prog="axonn-ext", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"axonn-ext {axonn_ext.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for command in (train, compare, bench, tune, doctor):
        command.add_parser(commands)
    return parser


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


def _report(here: Process | None, text: str) -> None:
    """Writes the text to stderr, each line with the rank if there are several, in one piece."""
    prefix = f"[rank {here.rank}] " if here is not None and here.world_size > 1 else ""
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    sys.stderr.flush()
