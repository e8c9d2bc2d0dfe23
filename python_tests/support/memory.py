"""Measures the memory of a process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20


def anonymous_bytes() -> int:
    """This process's private memory, without mapped files and shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def peaks_beside_threads(call: Callable[[], object]) -> tuple[int, int]:
    """Returns a lower and an upper bound on the peak number of bytes that a call holds.

    Torch's profiler does not see memory that threads of other libraries free. Gloo's threads, for
    example, drop the last reference to a collective's tensors. Memory whose release was not seen
    counts in the upper bound until its address is reused, and not at all in the lower one.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None
    changes, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    changes.sort()
    held: dict[int, tuple[int, int]] = {}  # address -> (time of allocation, bytes)
    sure: list[tuple[int, int]] = []  # (time, change in bytes)
    now = most = 0
    for when, address, size in changes:
        taken, known = held.pop(address, (when, 0))
        now -= known
        if size > 0:
            held[address] = when, size
            now += size
        else:
            sure += [(taken, known), (when, -known)]
        most = max(most, now)
    sure.sort()
    return max(accumulate(change for _, change in sure), default=0), most
