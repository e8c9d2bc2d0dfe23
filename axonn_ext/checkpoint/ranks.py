"""How the ranks of a job agree about a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.rank_values import of_all_ranks, of_first_rank
from axonn_ext.side_groups import destroy, new_group

# A rank may wait so long for another one that writes to a slow disk. One that has ended is noticed
# at once.
PATIENCE = timedelta(hours=2)


class Ranks:
    """The ranks that write or read a checkpoint together: a gloo group, or this process alone."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def agree(self, error: str | None) -> None:
        """Raises CheckpointError on every rank if one has an error: the first one, with its rank.

        An error that all ranks have is raised as it is.
        Collectives: an all-gather of the errors.
        """
        errors: list[str | None] = [error]
        if self.group is not None:
            errors = of_all_ranks(error, self.group)
        if len(set(errors)) == 1 and errors[0] is not None:
            raise CheckpointError(errors[0])
        for rank, text in enumerate(errors):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}")

    def union(self, names: Iterable[str]) -> set[str]:
        """Returns the names that some rank has. Collectives: an all-gather of the names."""
        own = set(names)
        return own if self.group is None else own.union(*of_all_ranks([*own], self.group))

    def told(self, function: Callable[[], str]) -> str:
        """Returns, on every rank, what the function returns on rank 0.

        Collectives: a broadcast of the text.
        """
        text = function() if self.rank == 0 else ""
        return text if self.group is None else str(of_first_rank(text, self.group))

    def agreed(self, function: Callable[[], None], *, on_rank: int | None = None) -> None:
        """Calls the function, on one rank or on all, and raises its CheckpointError on every rank.

        An OSError or a ValueError becomes a CheckpointError.
        """
        error = None
        if on_rank is None or on_rank == self.rank:
            try:
                function()
            except (CheckpointError, OSError, ValueError) as failure:
                error = str(failure)
        self.agree(error)


def make_group() -> ProcessGroup | None:
    """Returns a new gloo group of all ranks; None in a process without any group.

    All ranks must call it. Collectives: those of torch.distributed.new_group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    return new_group(description="checkpoint", backend="gloo", patience=PATIENCE)


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Yields all ranks, in a group that is made for the block."""
    group = make_group()
    yield Ranks(group)
    if group is not None:  # after an error, peers may still need it
        destroy(group)
