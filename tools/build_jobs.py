"""Decides how many files setup.py compiles at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from find_cuda import BuildError

NVCC_BYTES = 6 << 30  # nvcc takes 5.6 GB for each file of GEMMs (csrc/core/cuda/sm90)


@dataclass(frozen=True)
class Jobs:
    count: int
    reason: str


def choose_jobs(requested: str | None, *, cores: int, available_bytes: int | None) -> Jobs:
    """The number of files to compile at once: at least one, and never more than was requested.

    requested        MAX_JOBS; None or empty: one per core
    available_bytes  the available memory, NVCC_BYTES per job; None: memory is no limit

    Raises: BuildError if MAX_JOBS is not a whole number from 1 on.
    """
    if requested and not re.fullmatch("0*[1-9][0-9]*", requested):
        raise BuildError(f"MAX_JOBS must be a whole number from 1 on, or unset, got {requested!r}")
    wanted = int(requested) if requested else cores
    reason = f"MAX_JOBS={wanted}" if requested else "one per core"
    if available_bytes is None:
        return Jobs(wanted, reason)
    fitting = max(1, available_bytes // NVCC_BYTES)
    if fitting >= wanted:
        return Jobs(wanted, reason)
    return Jobs(
        fitting,
        f"nvcc needs up to {NVCC_BYTES >> 30} GiB for a file, and "
        f"{available_bytes / (1 << 30):.1f} GiB of memory are available",
    )


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The bytes that programs can still allocate without swapping; None if unknown.

    In a container, /proc/meminfo shows the host's memory; the container's limit is in its cgroup
    (version 2).
    """
    if not meminfo.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if found is None:
        return None
    free = int(found[1]) * 1024
    limit = cgroup / "memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return free
    used = int((cgroup / "memory.current").read_text())
    cache = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    used -= int(cache[1]) if cache else 0  # the kernel frees it when programs need memory
    return min(free, max(int(most) - used, 0))
