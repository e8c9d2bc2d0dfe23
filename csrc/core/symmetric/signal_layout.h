// Maps chunks to the flags of a signal pad. Both backends use this layout. On the CPU a flag lies
// in the pad of the rank that wrote the chunk, and peers read it there; on CUDA the transport
// writes it into the pad of the rank that waits.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"
#include "core/schedule/chunk_plan.h"
#include "core/symmetric/epoch_flag.h"

namespace axonn::comm {

// The number of flags in a pad; each has its own cache lines.
inline constexpr int64_t kNumSignals = 1024;
inline constexpr int64_t kSignalStride = kFlagAlignment;

// A collective signals each chunk once in each phase. A gather or scatter has one phase; an
// all-reduce has a second, in which the sums are broadcast.
struct SignalLayout {
  int64_t num_phases;
  int64_t num_shards;
  int64_t chunks_per_shard;

  AXONN_HOST_DEVICE static constexpr SignalLayout of(const ChunkPlan& plan, int64_t num_phases) {
    return {num_phases, plan.num_shards, plan.chunks_per_shard};
  }

  AXONN_HOST_DEVICE constexpr int64_t num_flags() const {
    return num_phases * num_shards * chunks_per_shard;
  }

  // `index.shard` is the shard that the chunk belongs to, with one exception: for the addends of a
  // scatter in a pad that other ranks write (CUDA), it is the source rank, because the destination
  // is the pad's owner.
  AXONN_HOST_DEVICE constexpr int64_t flag(int64_t phase, ChunkIndex index) const {
    return (phase * num_shards + index.shard) * chunks_per_shard + index.chunk;
  }
};

// Returns a flag's offset from the first flag, in bytes.
AXONN_HOST_DEVICE constexpr int64_t signal_offset_bytes(int64_t flag) {
  return flag * kSignalStride;
}

}  // namespace axonn::comm
