// Kernels of different ranks signal each other through flags in device memory. A flag holds the
// last epoch that reached it (core/symmetric/epoch_flag.h); peers write it, or push_flag does.
#pragma once

#include <cstdint>

#include "core/cuda/fused/flags.h"
#include "core/symmetric/epoch_flag.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::kernels::cuda {

// Pairs with store_release and with push_flag: everything written before the flag
// is visible to this thread afterwards.
__device__ inline uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ inline void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Orders accesses to the same memory through different addresses; a multicast address aliases the
// address of every rank. Needed between writes through one address and reads through another,
// anywhere on the chain of flags from the writes to the reads.
__device__ inline void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// Pairs with itself: everything this thread saw before is visible to any CTA of this device that
// adds later.
__device__ inline uint32_t add_acq_rel(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

__device__ inline uint64_t global_timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ inline uint32_t* flag_at(void* pad, int64_t flag) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(pad) + comm::signal_offset_bytes(flag));
}
__device__ inline const uint32_t* flag_at(const void* pad, int64_t flag) {
  return reinterpret_cast<const uint32_t*>(static_cast<const char*>(pad) +
                                           comm::signal_offset_bytes(flag));
}

// The chunk that a wait is for, by its ordinal; reported if the wait fails.
struct Awaited {
  int32_t chunks_per_shard;
  int32_t ordinal;
};

// Records the failed wait, unless a record exists, and traps. The trap ends the kernel and the
// context, because a result that lacks a peer's part must not be used. The record is in host
// memory, where the host can still read it.
__device__ inline void fail_wait(const SpinLimit& limit, Awaited what, uint32_t target,
                                 uint32_t seen, bool own_rows_stay) {
  if (atomicCAS_system(&limit.failure->state, SpinFailure::kNone, SpinFailure::kWriting) ==
      SpinFailure::kNone) {
    limit.failure->rank = limit.rank;
    limit.failure->peer = what.ordinal / what.chunks_per_shard;
    limit.failure->chunk = what.ordinal % what.chunks_per_shard;
    limit.failure->expected = target;
    limit.failure->seen = seen;
    limit.failure->own_rows_stay = own_rows_stay;
    __threadfence_system();
    atomicExch_system(&limit.failure->state, SpinFailure::kWritten);
    __threadfence_system();
  } else {
    // The trap ends all threads, so wait until the other thread has completed its record.
    const uint64_t start = global_timer_ns();
    while (load_acquire(&limit.failure->state) != SpinFailure::kWritten &&
           global_timer_ns() - start < 10'000'000) {
    }
  }
  __trap();
}

// Waits until the flag has reached epoch `target`; traps after limit.budget_ns.
__device__ inline void await_flag(const uint32_t* flag, uint32_t target, const SpinLimit& limit,
                                  Awaited what) {
  uint32_t seen = load_acquire(flag);
  if (comm::epoch_reached(seen, target)) return;
  const uint64_t deadline = global_timer_ns() + limit.budget_ns;
  do {
    __nanosleep(64);
    seen = load_acquire(flag);
    if (comm::epoch_reached(seen, target)) return;
  } while (global_timer_ns() < deadline);
  fail_wait(limit, what, target, seen, false);
}

// Same for rows that arrive while this rank's own rows leave. Waits own_rows_ns first, and fails if
// the own rows have not left by then; otherwise waits for the whole budget as well.
__device__ inline void await_rows(const uint32_t* flag, uint32_t target, const SpinLimit& limit,
                                  Awaited what) {
  uint32_t seen = load_acquire(flag);
  if (comm::epoch_reached(seen, target)) return;
  bool is_last = limit.own_rows_left == nullptr || limit.own_rows_ns >= limit.budget_ns;
  uint64_t deadline = global_timer_ns() + (is_last ? limit.budget_ns : limit.own_rows_ns);
  bool stay = false;
  while (!stay) {
    __nanosleep(64);
    seen = load_acquire(flag);
    if (comm::epoch_reached(seen, target)) return;
    if (global_timer_ns() < deadline) continue;
    if (is_last) break;
    is_last = true;
    deadline += limit.budget_ns;
    stay = !comm::epoch_reached(load_acquire(limit.own_rows_left), target);
  }
  fail_wait(limit, what, target, seen, stay);
}

}  // namespace axonn::kernels::cuda
