"""The place of a process in its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """The place of this process in the job."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_first_of_host(self) -> bool:
        """Whether it stands for its host: of ranks in a row, one is a multiple of their number."""
        return self.rank % self.local_world_size == 0
