"""Finds a rank that is persistently slower than the others."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.grid import AXES

WINDOW = 50  # steps after which ranks compare their times
IN_A_ROW = 5  # windows in which the same rank must be the slowest before it is named
SLOWER = 1.2  # the smallest ratio to the fastest rank's time that counts as slow
OF_A_STEP = 0.05  # the smallest fraction of a step that a slow rank must cost
_RANK_BITS = 20
_PROBE_SIZE, _PRODUCTS, _ROUNDS = 2048, 8, 3


class SlowRanks:
    """Names a rank whose own work takes longer than other ranks' for IN_A_ROW windows.

    Ranks wait for the slowest one in every step, so their steps all take equally long. On CPUs they
    compare the median step time without waits for others; on GPUs, where the waits inside kernels
    cannot be measured, the time of a matmul. Pipeline stages do different work, so each is compared
    separately. Collectives, in the first step and every WINDOW steps: an all-reduce of three
    integers along each axis but pipe, and one of one integer along pipe.

    say: shows a line to the user, on rank 0.
    """

    def __init__(self, grid: Grid, *, device: str, say: Callable[[str], None] | None = None):
        self._grid, self._device, self._say = grid, device, say
        self._probe = Probe(device) if device != "cpu" and grid.world_size > 1 else None
        self._own: list[float] = []  # seconds of this window's steps, without waits
        self._whole: list[float] = []  # with waits
        self._num_steps = 0
        self._slowest, self._in_a_row = -1, 0
        self._named: set[int] = set()

    def step(self, seconds: float, waited: float) -> None:
        """Records a step's total and waiting seconds. All ranks call it after each step."""
        if self._grid.world_size == 1:
            return
        self._num_steps += 1
        self._own.append(seconds - waited)
        self._whole.append(seconds)
        if self._num_steps == 1:
            self._slowest_of_all(0.0, 0.0)  # makes NCCL set up connections not yet used
        elif self._num_steps % WINDOW == 0:
            own, whole = median(self._own), OF_A_STEP * median(self._whole)
            self._own.clear()
            self._whole.clear()
            self._compare(*((own, whole) if self._probe is None else (self._probe.seconds(), 0.0)))

    def _compare(self, own: float, least: float) -> None:
        rank, ratio = self._slowest_of_all(own, least)
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
                f"warning: rank {rank} ({place}) slows down the job: {what} takes {ratio:.2f} "
                "times as long as on the fastest rank of its stage; it has been the slowest for "
                f"{IN_A_ROW * WINDOW} steps"
            )

    def _slowest_of_all(self, own: float, least: float) -> tuple[int, float]:
        """Returns the slowest rank, and the ratio of its time to the fastest rank's in its stage.

        least: minimum difference in seconds; below it the ratio is 1.
        """
        grid, micros = self._grid, max(1, round(own * 1e6))
        numbers = [_packed(micros, grid.rank), -micros, round(least * 1e6)]
        times = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        for axis in AXES:
            if axis != "pipe":
                self._largest(times, axis)
        slowest, shortest, least_micros = times.tolist()
        longest, rank = _unpacked(slowest)
        counts = longest + shortest >= least_micros  # shortest is negative
        worst = times[:1].fill_(_packed(1000 * longest // -shortest if counts else 1000, rank))
        self._largest(worst, "pipe")
        thousandths, rank = _unpacked(int(worst))
        return rank, thousandths / 1000

    def _largest(self, numbers: Tensor, axis: str) -> None:
        if self._grid.size(axis) > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._grid.group(axis))


class Probe:
    """Measures how fast this rank's GPU multiplies matrices."""

    def __init__(self, device: str) -> None:
        # Random numbers, since zeros need less power. Allocated now, so that no later step runs out
        # of memory; the user's generator is not touched.
        generator = torch.Generator(device).manual_seed(0)
        self._a = torch.randn(
            _PROBE_SIZE, _PROBE_SIZE, generator=generator, device=device, dtype=torch.bfloat16
        )
        self._out = torch.empty_like(self._a)

    def seconds(self) -> float:
        """Returns the shortest time of a matmul on the current stream; waits for the GPU."""
        return min(self._round() for _ in range(_ROUNDS))

    def _round(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._multiply()  # keeps the GPU busy while the host issues the others
        begin.record()
        for _ in range(_PRODUCTS):
            self._multiply()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _PRODUCTS

    def _multiply(self) -> None:
        torch.mm(self._a, self._a, out=self._out)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _packed(number: int, rank: int) -> int:
    return number << _RANK_BITS | rank


def _unpacked(both: int) -> tuple[int, int]:
    return both >> _RANK_BITS, both & (1 << _RANK_BITS) - 1


def _place(device: str) -> str:
    if device == "cpu":
        return f"host {socket.gethostname()}"
    index = torch.cuda.current_device()
    uuid = torch.cuda.get_device_properties(index).uuid
    return f"host {socket.gethostname()}, GPU {index}, UUID {uuid}"
