"""The place of a process in its job."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.settings import LaunchEnvironment, SettingsError


@dataclass(frozen=True)
class Process:
    """The place of this process in the job."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def of(cls, launch: LaunchEnvironment) -> Process:
        """Returns the place that a launcher gave a process.

        Raises: SettingsError if hosts have different numbers of ranks, or not consecutive ones.
        """
        rank, local, here = launch.rank, launch.local_rank, launch.local_world_size
        if launch.world_size % here or rank % here != local:
            problem = (
                f"each host must have the same number of ranks, in a row; rank {rank} of "
                f"{launch.world_size} is number {local} (LOCAL_RANK, SLURM_LOCALID) of {here} on "
                "its host (LOCAL_WORLD_SIZE, SLURM_STEP_TASKS_PER_NODE). srun does so with "
                "--ntasks-per-node N --distribution=block"
            )
            raise SettingsError({"LOCAL_RANK": problem})
        return cls(rank, launch.world_size, here)

    @property
    def is_first_of_host(self) -> bool:
        """Whether this is the first rank on its host: a multiple of the number of ranks there."""
        return self.rank % self.local_world_size == 0
