"""How much memory a process of a test has."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20


def anonymous_bytes() -> int:
    """This process's own memory: without files that are mapped, and without shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def peak_allocated(function: Callable[[], object]) -> int:
    """The most bytes that torch gives out for CPUs while the function runs, less what is freed.

    Files that torch maps count, too.
    """
    gc.collect()  # lest what is left of something else is freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
