// Copies that the copy engine makes, and flags that are raised after them.
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

// Raises a flag of a rank after what the stream has done before. The stream's queue writes the
// epoch if the host knows it and the queue can write there. Otherwise the copy engine copies the
// epoch. This device's memory has it nearer than the host's, but only what goes to another device
// may come from there.
void push_flag(const Peers& peers, int32_t to, int64_t flag, cudaStream_t stream);

// Returns the ranks that need this rank's rows, beginning with the one that needs them first. Each
// rank works through the shards from its own upwards.
inline int32_t receiver(const Peers& peers, int32_t step) {
  return (peers.rank - step + peers.num_ranks) % peers.num_ranks;
}

}  // namespace axonn::kernels::cuda
