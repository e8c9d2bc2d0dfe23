// Flags through which ranks signal each other. A flag holds the number of the last collective
// ("epoch") that reached it. It only moves forward and is never reset, so no second barrier is
// needed to clear it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/numeric/host_device.h"

namespace axonn::comm {

using Epoch = uint32_t;

// Two 64-byte lines, because the adjacent-line prefetcher of x86 moves lines in pairs.
inline constexpr int64_t kFlagAlignment = 128;

// Compares serial numbers. The result is correct as long as the two are less than 2^31 epochs
// apart, so counting past 2^32 does no harm.
AXONN_HOST_DEVICE constexpr bool epoch_reached(Epoch value, Epoch target) {
  return static_cast<int32_t>(value - target) >= 0;
}

struct alignas(kFlagAlignment) EpochFlag {
  std::atomic<Epoch> value;

  // The store is a release: everything that this rank wrote before is visible to a rank that
  // acquires this epoch. It is also sequentially consistent; SymmetricGroup::raise says why.
  void raise_to(Epoch epoch) { value.store(epoch, std::memory_order_seq_cst); }

  // The load is an acquire; it pairs with raise_to.
  bool reached(Epoch epoch) const {
    return epoch_reached(value.load(std::memory_order_acquire), epoch);
  }
};

// A word of shared memory that is not an epoch and has its own cache lines.
struct alignas(kFlagAlignment) SharedWord {
  std::atomic<uint32_t> value;
};

static_assert(sizeof(EpochFlag) == kFlagAlignment);
static_assert(std::atomic<Epoch>::is_always_lock_free, "a lock cannot be shared by processes");

}  // namespace axonn::comm
