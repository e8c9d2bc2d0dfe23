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
        """Whether no process of its host has a lower rank; torchrun gives hosts ranks in a row."""
        return self.rank % self.local_world_size == 0
