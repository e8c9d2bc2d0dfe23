// Finds out which peers' pads a stream's queue can write.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/handshake.h"

namespace axonn::kernels::cuda {

// Writes one word into each peer's pad from the queue of `stream`, and waits for the writes. A
// driver may refuse to write to another GPU, or silently do nothing. Since CUDA 13.1 such writes
// are not supported (NVIDIA/nccl#2052), so none are tried there. All pads must be mapped by then.
void write_probes(const Peers& peers, cudaStream_t stream);

// Returns one bit per rank, set if that rank's word is in this rank's pad. Call it after all ranks
// have returned from write_probes; rank r may then write flags at this rank if bit r is set.
uint32_t arrived_probes(const Peers& peers, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
