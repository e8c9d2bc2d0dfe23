// Probes which peers' pads a stream's queue can write.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/handshake.h"

namespace axonn::kernels::cuda {

// Lets the queue of `stream` write a word into the pad of each peer, and waits until it has. A
// driver may refuse to write to another GPU, or do nothing: since CUDA 13.1 it does not support
// that (NVIDIA/nccl#2052), so there nothing is tried. All pads must be mapped by then.
void write_probes(const Peers& peers, cudaStream_t stream);

// Returns a bit for each rank whose word is in this rank's pad. Call it after all ranks have
// returned from write_probes; rank r may then write flags at this rank if bit r is set.
uint32_t arrived_probes(const Peers& peers, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
