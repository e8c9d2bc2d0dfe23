"""Raises the limits of this machine for a process before anything is started."""

from __future__ import annotations

import resource
from contextlib import suppress

from axonn_ext.terminal.errors import UserError

# The files of a process that do not depend on the number of ranks, rounded up; and for each rank of
# the job: the least, of the process that serves the store (one connection of the rank, one of its
# watchdog, one of its preemption), and the most, of a rank whose groups over gloo have all ranks.
OPEN_FILES, LEAST_OF_A_RANK, MOST_OF_A_RANK = 64, 3, 8


def allow_open_files(num_ranks: int, *, agent: int | None = None) -> None:
    """Raises the limit on open files of this process, which its children inherit, as needed.

    agent: the process that has started this one, if it is torchrun; it may serve the store, and
    gets the same limit.

    Raises: UserError where the machine does not allow what a job of so many ranks needs at least.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + LEAST_OF_A_RANK * num_ranks
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a job of {num_ranks} {'process' if num_ranks == 1 else 'processes'} needs {needed} "
            f"open files in each, but this machine allows {hard}: raise the limit (ulimit -n)"
        )
    most = OPEN_FILES + MOST_OF_A_RANK * num_ranks
    _raise(0, most)  # of this process
    if agent is not None:
        with suppress(OSError):  # it has ended, or is another user's
            _raise(agent, most)


def _raise(process: int, most: int) -> None:
    """Raises the soft limit of a process to so many files, or to its hard limit."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.prlimit(process, resource.RLIMIT_NOFILE, (wanted, hard))
