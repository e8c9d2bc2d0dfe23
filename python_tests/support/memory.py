"""How much memory a process of a test has."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def anonymous_bytes() -> int:
    """This process's own memory: without files that are mapped, and without shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")
