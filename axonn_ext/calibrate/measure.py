"""Times calls that all ranks make together, interleaved so that noise affects all calls alike.

The clock is CLOCK_MONOTONIC, which all processes of a host share. The time of a batch is from the
first rank's start to the last rank's end: if ranks outnumber cores, a rank cannot see the time that
it spent waiting for a core.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from axonn_ext.ranks.side_groups import new_group

T = TypeVar("T")

ROUNDS = 30
MIN_BATCH_SECONDS = 0.05  # ranks start about 50 us apart, which is a thousandth of that
# A batch is planned this much longer than it must be, so that few batches turn out too short.
_HEADROOM = 1.2
# A GPU is kept busy this long, about a millisecond, while the host enqueues the timed calls.
HEAD_START_CYCLES = 2_000_000
# The number of calls grows by this factor at most, since the first calls may be unusually slow.
_MAX_GROWTH = 50


class Ranks:
    """Ranks of one host that time calls together; their process group must support CPU tensors.

    group: by default, all ranks.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)

    def meet(self) -> None:
        """Waits until every rank has called this."""
        dist.barrier(self._group)

    def exchange(self, *values: float) -> list[tuple[float, ...]]:
        """Returns the values of every rank in rank order, on all ranks."""
        own = torch.tensor(values, dtype=torch.float64)
        all_values = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(all_values, own, group=self._group)
        return [tuple(rank_values.tolist()) for rank_values in all_values]


def ranks_of(device: str) -> Ranks:
    """Returns all ranks of a job on "cpu" or "cuda", where NCCL cannot exchange host times.

    All ranks must call this.
    """
    return Ranks(new_group(description="times", backend="gloo") if device == "cuda" else None)


@dataclass(frozen=True)
class Timing(Generic[T]):
    """The times of one call on the slowest rank."""

    samples_us: tuple[float, ...]  # the mean time of a call in the batch of each round
    calls_per_batch: int  # the number of calls in the last batch
    last: T  # the result, on this rank, of the last call of the last batch

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        return min(self.samples_us)

    @property
    def iqr_us(self) -> float:
        """The interquartile range of the samples."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return high - low


def measure(
    calls: Mapping[str, Callable[[], T]],
    ranks: Ranks,
    *,
    rounds: int = ROUNDS,
    min_batch_seconds: float = MIN_BATCH_SECONDS,
    synchronize: Callable[[], None] = lambda: None,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing[T]]:
    """Times each of `calls` by one batch of back-to-back calls in each of `rounds` rounds.

    All ranks of `ranks` must call this, with calls of the same names in the same order. A rank that
    has no part in a call passes one that returns at once. Each call should have run a few times
    before. Rounds start with different calls and run either forwards or backwards, so that no call
    always follows the same one. Ranks start a batch together. A batch that takes less than
    `min_batch_seconds` is repeated with more calls. Python's garbage collector runs between rounds.

    synchronize: waits for a call's work that is still running on a device.
    on_round: called after each round on every rank.
    """
    if rounds < 1 or not calls:
        raise ValueError(f"measure: expected calls and rounds >= 1, got {len(calls)} and {rounds}")

    def batch(call: Callable[[], T], num_calls: int) -> tuple[float, T]:
        ranks.meet()
        began = time.perf_counter()
        for _ in range(num_calls - 1):
            call()
        result = call()
        synchronize()
        return span(ranks, began, time.perf_counter()), result

    samples: dict[str, list[float]] = {name: [] for name in calls}
    num_calls = dict.fromkeys(calls, 1)
    last: dict[str, T] = {}
    with garbage_collected_by_hand():
        for round_number in range(-1, rounds):  # round -1 finds the number of calls
            for name in turns(list(calls), round_number):
                last.pop(name, None)  # frees its memory for the next calls
                seconds, last[name] = batch(calls[name], num_calls[name])
                while seconds < min_batch_seconds:
                    num_calls[name] = _more_calls(num_calls[name], seconds, min_batch_seconds)
                    del last[name]
                    seconds, last[name] = batch(calls[name], num_calls[name])
                if round_number >= 0:
                    samples[name].append(seconds / num_calls[name] * 1e6)
            gc.collect()
            if round_number >= 0:
                on_round()
    return {name: Timing(tuple(samples[name]), num_calls[name], last[name]) for name in calls}


def synchronize_with(device: str) -> Callable[[], None]:
    """Returns a function that waits for calls on the device; on "cuda", for the current stream."""
    if device == "cpu":
        return lambda: None
    return lambda: torch.cuda.current_stream().synchronize()


def span(ranks: Ranks, began: float, ended: float) -> float:
    """Returns the seconds from the first rank's start to the last rank's end, on all ranks."""
    times = ranks.exchange(began, ended)
    return max(end for _, end in times) - min(begin for begin, _ in times)


def turns(names: list[str], round_number: int) -> list[str]:
    """Returns the names in the order of a round; see `measure`."""
    turn, start = divmod(max(round_number, 0), len(names))
    order = names[start:] + names[:start]
    return order[::-1] if turn % 2 else order


def _more_calls(num_calls: int, seconds: float, min_seconds: float) -> int:
    """Returns the number of calls of the next batch, after one that was too short."""
    wanted = num_calls * _HEADROOM * min_seconds / max(seconds, 1e-9)
    return max(num_calls + 1, min(math.ceil(wanted), num_calls * _MAX_GROWTH))


@contextmanager
def garbage_collected_by_hand() -> Iterator[None]:
    """Turns off Python's garbage collector, and exempts existing objects from explicit runs."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
