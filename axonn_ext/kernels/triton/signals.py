# mypy: allow-untyped-defs, allow-untyped-calls
"""Flags between ranks in Triton: raised with release, awaited with acquire and a time limit.

Flags, epochs and failure records are those of csrc/core/cuda/fused (flags.h, flags.cuh), whose host
code starts these kernels, raises some of the flags and waits for others. All are passed by address,
as 64-bit numbers.

One thread executes an atomic on one word, and all threads of the program get its result, so loops
and branches that depend on it are uniform. But each thread reads the clock itself, so no Triton
branch may depend on the clock.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from axonn_ext.kernels.triton.schedule import FLAG_STRIDE, epoch_reached

# The words of a SpinFailure: its state, then rank, peer, chunk, epoch expected, epoch seen.
STATE_NONE, STATE_WRITTEN = tl.constexpr(0), tl.constexpr(2)

# fail_wait of flags.cuh, for the first thread of a program whose time is up. The first program of a
# rank to give up writes the record; the others wait for it (10 ms at most), since a trap ends all
# threads.
# $1: began ($2: budget), in ns; $3: the record; $4 to $8: its other words
_TRAP_IF_LATE = tl.constexpr("""
{
  .reg .pred late, ours, there;
  .reg .b64 now, since;
  .reg .b32 thread, state;
  mov.u64 now, %globaltimer;
  sub.u64 since, now, $1;
  setp.gt.u64 late, since, $2;
  mov.u32 thread, %tid.x;
  setp.eq.and.u32 late, thread, 0, late;
  @!late bra IN_TIME;
  atom.acq_rel.sys.global.cas.b32 state, [$3], 0, 1;
  setp.eq.u32 ours, state, 0;
  @!ours bra AWAIT_RECORD;
  st.global.b32 [$3+4], $4;
  st.global.b32 [$3+8], $5;
  st.global.b32 [$3+12], $6;
  st.global.b32 [$3+16], $7;
  st.global.b32 [$3+20], $8;
  fence.acq_rel.sys;
  st.release.sys.global.b32 [$3], 2;
  fence.sc.sys;
  bra GIVE_UP;
AWAIT_RECORD:
  ld.acquire.sys.global.b32 state, [$3];
  setp.eq.u32 there, state, 2;
  @there bra GIVE_UP;
  mov.u64 since, %globaltimer;
  sub.u64 since, since, now;
  setp.lt.u64 late, since, 10000000;
  @late bra AWAIT_RECORD;
GIVE_UP:
  trap;
IN_TIME:
  mov.u32 $0, 0;
}
""")


@triton.jit
def _now(INTERPRET: tl.constexpr):
    """Returns the time in nanoseconds; 0 in the interpreter, which has no clock."""
    if INTERPRET:
        now = tl.full((), 0, tl.int64)
    else:
        now = globaltimer()
    return now


@triton.jit
def _record(failure, rank, peer, chunk, expected, seen):
    """Writes the record in the interpreter, where a kernel cannot trap and goes on."""
    word_ptr = failure.to(tl.pointer_type(tl.int32))
    if tl.load(word_ptr) == STATE_NONE:
        tl.store(word_ptr + 1, rank)
        tl.store(word_ptr + 2, peer)
        tl.store(word_ptr + 3, chunk)
        tl.store(word_ptr + 4, expected)
        tl.store(word_ptr + 5, seen)
        tl.store(word_ptr, STATE_WRITTEN)


@triton.jit
def wait_for_chunk(pad, flag, chunks, epoch, rank, failure, timeout, INTERPRET: tl.constexpr):
    """Waits until the flag of a chunk has reached the epoch (acquire).

    A wait that takes longer than the timeout writes the failure record and kills the context,
    because a result that lacks a peer's part must not be used.

    pad      this rank's flags, `chunks` per shard, in rank order
    failure  a SpinFailure, in host memory
    timeout  nanoseconds; in the interpreter, which has no clock, a number of polls of the flag.
             There, every wait of a rank ends once one has failed
    """
    word_ptr = pad.to(tl.pointer_type(tl.int32)) + flag * FLAG_STRIDE
    began = _now(INTERPRET)
    looks = tl.full((), 0, tl.int64)
    # An atomic add of 0 serves as an atomic load, which not every version of Triton has.
    seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
    waiting = not epoch_reached(seen, epoch)
    while waiting:
        if INTERPRET:
            looks += 1
            if looks > timeout:
                _record(failure, rank, flag // chunks, flag % chunks, epoch, seen)
        else:
            tl.inline_asm_elementwise(
                _TRAP_IF_LATE, "=r,l,l,l,r,r,r,r,r",
                [began, timeout, failure, rank, flag // chunks, flag % chunks, epoch, seen],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
        waiting = not epoch_reached(seen, epoch)
        if INTERPRET:
            failed = tl.load(failure.to(tl.pointer_type(tl.int32))) == STATE_WRITTEN
            waiting = waiting and not failed


@triton.jit
def order_descriptor_loads(DESCRIPTORS: tl.constexpr, INTERPRET: tl.constexpr):
    """Orders acquired data before TMA loads, which use another memory proxy."""
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

    Everything that these programs stored before their calls is visible to a reader that acquires
    the flag. The counter is 0 again afterwards.
    counter_ptr  int32, this rank's     flag_ptr  int32, in any rank's memory
    """
    # The barrier orders all threads' stores before the release of one thread, which covers them. It
    # has system scope, because the stores may be to a peer's memory.
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys")
    if before == num_parts - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")
