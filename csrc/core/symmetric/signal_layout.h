// Which flag of a signal pad stands for which chunk. One layout for both backends: on the CPU a
// flag lies in the pad of the rank that wrote the chunk and peers look at it there; on CUDA the
// transport writes it into the pad of the rank that waits.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"
#include "core/schedule/chunk_plan.h"
#include "core/symmetric/epoch_flag.h"

namespace axonn::comm {

// Flags of a pad, each a line of its own.
inline constexpr int64_t kNumSignals = 1024;
inline constexpr int64_t kSignalStride = kFlagAlignment;

// A collective signals each chunk once a phase. A gather or scatter has one phase; an all-reduce
// has a second, in which the sums are handed out.
struct SignalLayout {
  int64_t num_phases;
  int64_t num_shards;
  int64_t chunks_per_shard;

  AXONN_HOST_DEVICE static constexpr SignalLayout of(const ChunkPlan& plan, int64_t num_phases) {
    return {num_phases, plan.num_shards, plan.chunks_per_shard};
  }

  // The most chunks per shard that fit; 0: not even whole shards do.
  AXONN_HOST_DEVICE static constexpr int64_t max_chunks(int64_t num_phases, int64_t num_shards) {
    return kNumSignals / (num_phases * num_shards);
  }

  AXONN_HOST_DEVICE constexpr int64_t num_flags() const {
    return num_phases * num_shards * chunks_per_shard;
  }
  AXONN_HOST_DEVICE constexpr bool legal() const {
    return num_phases >= 1 && num_shards >= 1 && chunks_per_shard >= 1 &&
           num_flags() <= kNumSignals;
  }

  // `index.shard` is the shard that the chunk belongs to. Pads that are written from outside (CUDA)
  // have, for the addends of a scatter, the source rank in its place: there the destination is the
  // pad's owner.
  AXONN_HOST_DEVICE constexpr int64_t flag(int64_t phase, ChunkIndex index) const {
    return (phase * num_shards + index.shard) * chunks_per_shard + index.chunk;
  }
};

// Where a flag lies, in bytes from the first.
AXONN_HOST_DEVICE constexpr int64_t signal_offset_bytes(int64_t flag) {
  return flag * kSignalStride;
}

}  // namespace axonn::comm
