# mypy: allow-untyped-defs, allow-untyped-calls
"""Flags between ranks, in Triton: raised with release, awaited with acquire, never forever.

A failure word ends every wait of a rank's kernels: 0 while all is well, else 1 + the number of the
flag that did not come in time. The first wait to give up sets it, all others see it and give up;
the host reads it (`Signals.raise_failure`).

Atomics on one word are executed by one thread and their result is handed to all threads of the
program, so that loops and branches that depend on them are uniform. A clock is read by each thread
for itself: nothing branches on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from axonn_ext.triton.schedule import FLAG_STRIDE, epoch_reached


@triton.jit
def _now(INTERPRET: tl.constexpr):
    """Nanoseconds; the interpreter has no clock."""
    if INTERPRET:
        now = tl.full((), 0, tl.int64)
    else:
        now = globaltimer()
    return now


@triton.jit
def wait_for_flag(flags_ptr, flag, epoch, failure_ptr, budget, INTERPRET: tl.constexpr):
    """Returns once the flag has reached the epoch (acquire) or a wait has failed.

    flags_ptr    int32, FLAG_STRIDE words apart; in this rank's memory
    failure_ptr  int32 [1]
    budget       nanoseconds; in the interpreter, which has no clock, looks at the flag
    """
    word_ptr = flags_ptr + flag * FLAG_STRIDE
    began = _now(INTERPRET)
    looks = tl.full((), 0, tl.int64)
    # An addition of 0 is the atomic load that every version of Triton has.
    waiting = not epoch_reached(tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys"), epoch)
    while waiting:
        looks += 1
        if INTERPRET:
            late = looks > budget
        else:
            late = _now(INTERPRET) - began > budget
        reached = epoch_reached(tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys"), epoch)
        failure = tl.where(late & (not reached), flag + 1, 0)
        # Tells the others, and hears of them; on the next look this wait ends, too.
        failed = tl.atomic_cas(failure_ptr, 0, failure, sem="relaxed", scope="gpu") != 0
        waiting = (not reached) & (not failed)


@triton.jit
def order_descriptor_loads(DESCRIPTORS: tl.constexpr, INTERPRET: tl.constexpr):
    """Orders what was acquired before TMA loads, which read through a proxy of their own."""
    if DESCRIPTORS and not INTERPRET:
        # Every thread fences, for any may issue the load. It returns a word as it must.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def signal_when_last(counter_ptr, num_parts, flag_ptr, epoch):
    """Raises the flag to the epoch if this is the last of `num_parts` programs' parts.

    What each of them stored before its call is visible to whoever acquires the flag. The counter
    is 0 again afterwards.
    counter_ptr  int32, this rank's     flag_ptr  int32, in any rank's memory
    """
    # All threads' stores before the one thread's release, which is cumulative over the barrier. At
    # system scope: what was stored may lie in a peer's memory.
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys")
    if before == num_parts - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@dataclass(frozen=True)
class Signals:
    """One rank's end of the signals of a fused op: who it is, where flags lie, and how far it is.

    All ranks make the same calls, in the same order, with the same sizes; each call that is not
    empty has an epoch of its own, one more than the last. Flags, counters and epochs begin at 0 on
    every rank before the first call of any. One object serves one op and its buffers.

    The epoch lies in device memory, so that a captured graph can be replayed: `advance` first, then
    the kernels of the call.
    """

    rank: int
    world_size: int
    chunks_per_shard: int
    flags: Tensor  # int32 [world_size * chunks_per_shard, 32], which peers write to
    flags_ptrs: Tensor  # int64 [world_size]: the address of every rank's `flags`
    counters: Tensor  # int32 [world_size * chunks_per_shard], this rank's alone
    epoch: Tensor  # int32 [1], likewise
    failure: Tensor  # int32 [1], likewise
    timeout_ns: int  # of one wait; in the interpreter the number of looks at a flag

    def advance(self) -> None:
        """Begins the next call: on the current stream, as everything here; 32 bits wrap around."""
        self.epoch.add_(1)

    def check(self, name: str, device: torch.device) -> None:
        """Raises ValueError, on behalf of `name`, for what its kernels could not work with."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"{name}: rank must be 0 to {self.world_size - 1}, got {self.rank} of "
                f"{self.world_size}"
            )
        if self.chunks_per_shard < 1:
            raise ValueError(
                f"{name}: chunks_per_shard must be positive, got {self.chunks_per_shard}"
            )
        if self.timeout_ns <= 0:
            raise ValueError(f"{name}: timeout_ns must be positive, got {self.timeout_ns}")
        count = self.world_size * self.chunks_per_shard
        words = (
            ("flags", self.flags, count * FLAG_STRIDE.value, torch.int32),
            ("flags_ptrs", self.flags_ptrs, self.world_size, torch.int64),
            ("counters", self.counters, count, torch.int32),
            ("epoch", self.epoch, 1, torch.int32),
            ("failure", self.failure, 1, torch.int32),
        )
        for argument, tensor, size, dtype in words:
            check_words(name, argument, tensor, size, dtype, device)

    def raise_failure(self, name: str) -> None:
        """Raises RuntimeError if a wait ended without its flag; waits for the kernels.

        After a failure flags and buffers are of no use: the failure word is not cleared.
        """
        flag = int(self.failure.item()) - 1
        if flag >= 0:
            peer, chunk = divmod(flag, self.chunks_per_shard)
            raise RuntimeError(
                f"{name}: rank {self.rank} gave up waiting for chunk {chunk} of rank {peer}, "
                "which did not arrive in time"
            )


def check_words(
    name: str,
    argument: str,
    tensor: Tensor,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises ValueError unless it is contiguous, has at least `count` elements, and lies there."""
    good = tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device
    if not good or tensor.numel() < count:
        raise ValueError(
            f"{name}: {argument} must be a contiguous tensor of at least {count} {dtype} on "
            f"{device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
