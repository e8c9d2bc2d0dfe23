"""Runs `axonn-ext verify` as on a machine with an H100, but with targets on the CPU as groups.

    python verify_on_cpu.py KERNEL=TARGET ... -- [ARGUMENT ...]

A target is a function of verify_targets.py. The arguments are passed to the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path


def verify_command(*cases: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line to use in place of `axonn-ext verify`."""
    return [sys.executable, str(Path(__file__)), *cases, "--", *arguments]


def main(argv: Sequence[str]) -> int:
    from axonn_ext.cli import main as axonn_ext
    from axonn_ext.cli import verify as command
    from axonn_ext.verify import groups, run
    from axonn_ext.verify.groups import Group
    from stamp_cases import H100

    end = list(argv).index("--")
    pairs = [case.split("=") for case in argv[:end]]
    found = [Group(f"{k}: {t}", k, f"verify_targets:{t}") for k, t in pairs]
    command.DEVICE_FILES = ("null",)
    command.find_gpus = lambda: (1, H100.gpu)  # type: ignore[assignment]
    command.key_of = lambda gpu: H100  # type: ignore[assignment]
    groups.groups = lambda num_gpus: found  # type: ignore[assignment]
    run.run_groups = partial(run.run_groups, device="cpu")  # type: ignore[assignment]
    support = str(Path(__file__).parent)  # so that the workers find the targets
    os.environ["PYTHONPATH"] = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    return axonn_ext(["verify", *argv[end + 1 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
