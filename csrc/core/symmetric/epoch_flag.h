// Signals between ranks. A flag holds the number of the last collective ("epoch") that reached it;
// it only ever moves forward and is never reset, so no second barrier is needed to clear it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/numeric/host_device.h"

namespace axonn::comm {

using Epoch = uint32_t;

// Two 64-byte lines: the adjacent-line prefetcher of x86 moves them in pairs.
inline constexpr int64_t kFlagAlignment = 128;

// Serial-number comparison: right as long as the two are less than 2^31 epochs apart, so that
// counting past 2^32 is harmless.
AXONN_HOST_DEVICE constexpr bool epoch_reached(Epoch value, Epoch target) {
  return static_cast<int32_t>(value - target) >= 0;
}

struct alignas(kFlagAlignment) EpochFlag {
  std::atomic<Epoch> value;

  // Release: everything this rank wrote before is visible to whoever acquires this epoch.
  // Sequentially consistent beside that: see SymmetricGroup::raise.
  void raise_to(Epoch epoch) { value.store(epoch, std::memory_order_seq_cst); }

  // Acquire: pairs with raise_to.
  bool reached(Epoch epoch) const {
    return epoch_reached(value.load(std::memory_order_acquire), epoch);
  }
};

// A word of shared memory on lines of its own that is no epoch.
struct alignas(kFlagAlignment) SharedWord {
  std::atomic<uint32_t> value;
};

static_assert(sizeof(EpochFlag) == kFlagAlignment);
static_assert(std::atomic<Epoch>::is_always_lock_free, "a lock cannot be shared by processes");

}  // namespace axonn::comm
