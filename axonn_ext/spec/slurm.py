"""Translates Slurm's variables, for a task that srun started, to torchrun's."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below the ports that Linux assigns by itself
_STEPS_OF_A_JOB = 16  # successive steps have different ports


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for one of several tasks of a Slurm step; else {}.

    A batch script is not a task, although Slurm sets SLURM_PROCID there, too. Nothing is returned
    for a process whose RANK or WORLD_SIZE says that another launcher started it inside the step.

    Raises ValueError, which names the variable, if Slurm's variables cannot be read.
    """
    rank = environment.get("SLURM_PROCID", "")
    size = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", ""))
    hosts = environment.get("SLURM_STEP_NODELIST", "")
    started_by_another = (
        environment.get("RANK", rank) != rank or environment.get("WORLD_SIZE", size) != size
    )
    if not (rank and hosts) or size in ("", "1") or started_by_another:
        return {}
    here = _tasks_of_node(environment)
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_WORLD_SIZE": environment.get("SLURM_STEP_NUM_NODES", ""),
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(_FIRST_PORT + (job * _STEPS_OF_A_JOB + step) % _NUM_PORTS),
    }


def first_host(hosts: str) -> str:
    """Returns the first host of a list like "gpu[007-010,12],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None  # the pattern also matches the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _tasks_of_node(environment: Mapping[str, str]) -> int:
    """Returns the number of tasks on this node, from a list of all nodes like "4(x2),3"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environment.get(name, environment.get("SLURM_NTASKS_PER_NODE", ""))
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,5})\))?", item)
        if not match:
            raise ValueError(f"{name} must read like 4(x2),3, as Slurm sets it, got {text[:60]!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID")
    return counts[node if node < len(counts) else 0]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{name} must be a whole number, as Slurm sets it, got {text[:60]!r}")
    return int(text)
