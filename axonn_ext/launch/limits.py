"""Checks the limits of this machine for a process before anything is started."""

from __future__ import annotations

import resource

from axonn_ext.terminal.errors import UserError

# The most files that a launcher, or a rank, has open, rounded up, and how many each further rank
# adds, which has a connection for each group that it shares.
OPEN_FILES, OPEN_FILES_OF_A_RANK = 64, 8


def allow_open_files(num_ranks: int) -> None:
    """Increases this process's limit of open files, which its children inherit, for so many ranks.

    Raises: UserError where the machine does not allow the limit that they need.
    """
    needed = OPEN_FILES + OPEN_FILES_OF_A_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a job of {num_ranks} {'process' if num_ranks == 1 else 'processes'} needs {needed} "
            f"open files in each, but this machine allows {hard}: raise the limit (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
