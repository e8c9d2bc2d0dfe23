"""Finds a rank that is slower than the others, and stays so."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.grid import Grid
from axonn_ext.spec.grid import AXES

WINDOW = 50  # steps after which ranks compare their times
IN_A_ROW = 5  # windows in which the same rank must be the slowest before it is named
SLOWER = 1.2  # how many times the fastest rank's time it must need
_RANK_BITS = 20
_PROBE_SIZE, _NUM_PROBES = 4096, 3


class SlowRanks:
    """Names a rank whose own work takes longer than that of others for IN_A_ROW windows.

    Ranks wait for the slowest one in every step, so that their steps all take as long. On CPUs they
    compare the median of what is left of a step without its waits; on GPUs, where nobody knows how
    long kernels wait, the time of a matmul. Stages of a pipeline, which differ in work, are
    compared by themselves. Collectives: every WINDOW steps, an all-reduce of two integers along
    each axis.

    waited: returns the seconds for which this rank has waited for others so far. say: shows a line
    to the user, on rank 0.
    """

    def __init__(
        self, grid: Grid, *, device: str, waited: Callable[[], float],
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._grid, self._device, self._waited, self._say = grid, device, waited, say
        self._waited_before = 0.0
        self._own: list[float] = []  # seconds of the steps of this window
        self._slowest, self._in_a_row = -1, 0
        self._named: set[int] = set()

    def step(self, seconds: float) -> None:
        """Takes the seconds of a step; all ranks call it after each one."""
        if self._grid.world_size == 1:
            return
        waited = self._waited() if self._device == "cpu" else 0.0
        self._own.append(seconds - (waited - self._waited_before))
        self._waited_before = waited
        if len(self._own) == WINDOW:
            median = sorted(self._own)[WINDOW // 2]
            self._own.clear()
            self._compare(median if self._device == "cpu" else matmul_seconds(self._device))

    def _compare(self, own: float) -> None:
        rank, ratio = self._slowest_of_all(own)
        self._in_a_row = self._in_a_row + 1 if rank == self._slowest else 1
        if ratio < SLOWER:
            rank, self._in_a_row = -1, 0
        self._slowest = rank
        if self._in_a_row == IN_A_ROW and rank not in self._named:
            self._named.add(rank)
            self._tell(rank, ratio)

    def _tell(self, rank: int, ratio: float) -> None:
        assert dist.group.WORLD is not None
        store, key = dist.group.WORLD.get_group_store(), f"axonn/slow_rank/{rank}"
        if rank == self._grid.rank:
            store.set(key, _place(self._device))
        if self._say is not None:
            place = store.get(key).decode()  # waits for it
            what = "a step without its waits" if self._device == "cpu" else "a matmul"
            self._say(
                f"warning: rank {rank} ({place}) slows down the job: {what} takes it {ratio:.2f} "
                f"times as long as the fastest rank, for {IN_A_ROW * WINDOW} steps now"
            )

    def _slowest_of_all(self, own: float) -> tuple[int, float]:
        """Returns the slowest rank, and its time as a multiple of that of its stage's fastest."""
        grid, micros = self._grid, max(1, round(own * 1e6))
        times = torch.tensor([_packed(micros, grid.rank), -micros], device=self._device)
        for axis in AXES:
            if axis != "pipe":
                self._largest(times, axis)
        (longest, rank), shortest = _unpacked(int(times[0])), -int(times[1])
        worst = times[:1].fill_(_packed(round(1000 * longest / shortest), rank))
        self._largest(worst, "pipe")
        thousandths, rank = _unpacked(int(worst))
        return rank, thousandths / 1000

    def _largest(self, numbers: Tensor, axis: str) -> None:
        if self._grid.size(axis) > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._grid.group(axis))


def _packed(number: int, rank: int) -> int:
    return number << _RANK_BITS | rank


def _unpacked(both: int) -> tuple[int, int]:
    return both >> _RANK_BITS, both & (1 << _RANK_BITS) - 1


def _place(device: str) -> str:
    gpu = "" if device == "cpu" else f", GPU {torch.cuda.current_device()}"
    return f"host {socket.gethostname()}{gpu}"


def matmul_seconds(device: str) -> float:
    """Returns the shortest time of a few products of square matrices on the current stream."""
    a = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(_NUM_PROBES + 1):  # the first one may load the kernel
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(a, a)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[1:])
