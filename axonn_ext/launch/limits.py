"""What this machine lets a process have, looked at before anything is started."""

from __future__ import annotations

import resource

from axonn_ext.terminal.errors import UserError

# What a launcher, or a rank, holds open at its most, rounded up; and what each further rank adds,
# which is a connection for each group that it shares.
OPEN_FILES, OPEN_FILES_OF_A_RANK = 64, 8


def allow_open_files(num_ranks: int) -> None:
    """Raises this process's limit, which its children inherit, if so many ranks need a higher one.

    Raises: UserError where the machine allows no such limit.
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
