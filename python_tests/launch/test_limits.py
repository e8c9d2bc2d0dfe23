"""The limit on open files, in a separate process."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from commands import environment
from limits import HANG_SECONDS

ALLOW = """
import os, resource, sys
from axonn_ext.ranks.launch.limits import allow_open_files
from axonn_ext.terminal.errors import UserError
try:
    allow_open_files(
        int(sys.argv[1]), serves="elsewhere" not in sys.argv,
        agent=os.getppid() if "agent" in sys.argv else None,
    )
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
except UserError as error:
    print(error)
"""
AGENT = """
import resource, subprocess, sys
print(subprocess.check_output([sys.executable, *sys.argv[1:]], text=True), end="")
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def allowed(soft: int, hard: int, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", *arguments], env=environment(), capture_output=True, text=True,
        timeout=HANG_SECONDS, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("soft", "hard", "num_ranks", "expected"),
    [
        (256, 4096, 8, "256 4096"),  # enough
        (256, 4096, 100, "864 4096"),
        (256, 4096, 1000, "4096 4096"),  # the minimum is available
        (
            256, 4096, 8192,
            "a job of 8192 ranks needs 24640 open files here, but this machine allows 4096: "
            "raise the limit (ulimit -n)",
        ),
    ],
)  # fmt: skip
def test_the_limit_follows_the_number_of_ranks(
    soft: int, hard: int, num_ranks: int, expected: str
) -> None:
    assert allowed(soft, hard, ALLOW, str(num_ranks)) == [expected]


def test_only_the_host_of_the_store_needs_a_file_for_each_rank() -> None:
    assert allowed(256, 4096, ALLOW, "8192", "elsewhere") == ["4096 4096"]


def test_the_agent_that_serves_the_store_gets_the_same() -> None:
    command = ("-c", ALLOW, "100", "agent")
    assert allowed(256, 4096, AGENT, *command) == ["864 4096", "864 4096"]
