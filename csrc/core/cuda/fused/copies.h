// Copies by the copy engine, and the flags raised after them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/fused/handshake.h"

namespace axonn::kernels::cuda {

inline char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

inline void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  AXONN_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}

// Raises a flag at rank `to` after the stream's earlier work. The stream's queue writes the epoch
// if the host knows it and the queue can write there. Otherwise the copy engine copies it: from
// this device's memory, which is nearer, if the copy leaves this device; if not, from pinned host
// memory (Peers::epoch_to_push says why).
void push_flag(const Peers& peers, int32_t to, int64_t flag, cudaStream_t stream);

// Returns the rank that is number `step` to need this rank's rows; number 0 is this rank. Each rank
// works through the shards upwards from its own.
inline int32_t receiver(const Peers& peers, int32_t step) {
  return (peers.rank - step + peers.num_ranks) % peers.num_ranks;
}

}  // namespace axonn::kernels::cuda
