"""The place of a process in its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """The place of this process in the job."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
