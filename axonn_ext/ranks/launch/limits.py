"""Raises a process's limits on this machine before anything is started."""

from __future__ import annotations

import resource
from contextlib import suppress

from axonn_ext.terminal.errors import UserError

# Open files of a process: those that do not depend on the number of ranks, rounded up; per rank of
# the job, the least, in the process that serves the store (one connection of a rank's main thread,
# two of its bell); and the most, in a rank whose gloo groups contain all ranks.
OPEN_FILES, LEAST_OF_A_RANK, MOST_OF_A_RANK = 64, 3, 8


def allow_open_files(num_ranks: int, *, serves: bool, agent: int | None = None) -> None:
    """Raises the limit on open files of this process, which its children inherit, as needed.

    serves: whether this process, or one on its host, serves the store. agent: the process that has
        started this one, if it is torchrun; it may serve the store, and gets the same limit.

    Raises: UserError if the store's machine does not allow the number needed at least.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + LEAST_OF_A_RANK * num_ranks
    if serves and hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a job of {num_ranks} {'rank' if num_ranks == 1 else 'ranks'} needs {needed} open "
            f"files here, but this machine allows {hard}: raise the limit (ulimit -n)"
        )
    most = OPEN_FILES + MOST_OF_A_RANK * num_ranks
    _raise(0, most)  # of this process
    if agent is not None:
        with suppress(OSError):  # it has ended, or is another user's
            _raise(agent, most)


def _raise(process: int, most: int) -> None:
    """Raises the soft limit of a process to `most` files, or to its hard limit."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.prlimit(process, resource.RLIMIT_NOFILE, (wanted, hard))
