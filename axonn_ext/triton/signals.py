# mypy: allow-untyped-defs, allow-untyped-calls
"""Flags between ranks in Triton, raised with release, awaited with acquire and a time limit.

A failure word ends every wait of a rank's kernels. It is 0 while there is no failure, else 1 + the
number of the flag that was not raised in time. The first wait that gives up sets it, and all other
waits see it and give up as well. The host reads it in `Signals.raise_failure`.

One thread executes an atomic on one word, and all threads of the program get its result, so loops
and branches that depend on it are uniform. But each thread reads the clock for itself, so nothing
may branch on the clock.
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
    """Returns the time in nanoseconds; 0 in the interpreter, which has no clock."""
    if INTERPRET:
        now = tl.full((), 0, tl.int64)
    else:
        now = globaltimer()
    return now


@triton.jit
def wait_for_flag(flags_ptr, flag, epoch, failure_ptr, budget, INTERPRET: tl.constexpr):
    """Waits until the flag has reached the epoch (acquire) or a wait has failed.

    flags_ptr    int32, FLAG_STRIDE words apart; in this rank's memory
    failure_ptr  int32 [1]
    budget       nanoseconds; in the interpreter, which has no clock, the number of looks at the
                 flag
    """
    word_ptr = flags_ptr + flag * FLAG_STRIDE
    began = _now(INTERPRET)
    looks = tl.full((), 0, tl.int64)
    # An atomic addition of 0 serves as an atomic load, which not every version of Triton has.
    waiting = not epoch_reached(tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys"), epoch)
    while waiting:
        looks += 1
        if INTERPRET:
            late = looks > budget
        else:
            late = _now(INTERPRET) - began > budget
        reached = epoch_reached(tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys"), epoch)
        failure = tl.where(late & (not reached), flag + 1, 0)
        # This sets the failure word if this wait gives up, and reads the failures of other waits.
        failed = tl.atomic_cas(failure_ptr, 0, failure, sem="relaxed", scope="gpu") != 0
        waiting = (not reached) & (not failed)


@triton.jit
def order_descriptor_loads(DESCRIPTORS: tl.constexpr, INTERPRET: tl.constexpr):
    """Orders acquired data before TMA loads, which read through another memory proxy."""
    if DESCRIPTORS and not INTERPRET:
        # Every thread executes the fence, since any thread may issue the load. Inline assembly must
        # return a word.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def signal_when_last(counter_ptr, num_parts, flag_ptr, epoch):
    """Raises the flag to the epoch if this is the last of `num_parts` programs to call this.

    Everything that these programs stored before their calls is visible to whoever acquires the
    flag. The counter is 0 again afterwards.
    counter_ptr  int32, this rank's     flag_ptr  int32, in any rank's memory
    """
    # The barrier orders all threads' stores before the release of one thread, which covers them. It
    # has system scope, because the stores may be to a peer's memory.
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys")
    if before == num_parts - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@dataclass(frozen=True)
class Signals:
    """The signals of a fused op on one rank: its rank, the addresses of flags, and its epoch.

    All ranks must make the same calls in the same order with the same sizes. Each call that is not
    empty has its own epoch, one more than the call before. Flags, counters and epochs must be 0 on
    every rank before any rank makes its first call. One object serves one op and its buffers.

    The epoch lies in device memory, so that a captured graph can be replayed. A call consists of
    `advance` and then its kernels.
    """

    rank: int
    world_size: int
    chunks_per_shard: int
    flags: Tensor  # int32 [world_size * chunks_per_shard, 32], to which peers write
    flags_ptrs: Tensor  # int64 [world_size]: the address of every rank's `flags`
    counters: Tensor  # int32 [world_size * chunks_per_shard], used only by this rank
    epoch: Tensor  # int32 [1], used only by this rank
    failure: Tensor  # int32 [1], used only by this rank
    timeout_ns: int  # the limit of one wait; in the interpreter, the number of looks at a flag

    def advance(self) -> None:
        """Begins the next call, on the current stream. The 32-bit epoch may wrap around."""
        self.epoch.add_(1)

    def check(self, name: str, device: torch.device) -> None:
        """Raises ValueError, which names the op, for tensors that its kernels cannot use."""
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
        """Waits for the kernels, and raises RuntimeError if a wait has failed.

        After a failure, flags and buffers cannot be used again, and the failure word stays set.
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
    """Raises ValueError unless the tensor is contiguous, has the dtype, at least `count` elements,
    and lies on the device."""
    good = tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device
    if not good or tensor.numel() < count:
        raise ValueError(
            f"{name}: {argument} must be a contiguous tensor of at least {count} {dtype} on "
            f"{device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
