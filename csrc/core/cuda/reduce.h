// Device version of reduce_slots (csrc/core/numeric/reduce.h), with the same order and the same
// accumulation, and so the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/numeric/data_type.h"

namespace axonn::kernels::cuda {

inline constexpr int64_t kMaxSlots = 256;  // pointers are kernel parameters and use 2 of 4 KiB

// Sets destination[i] = sources[0][i] (op) sources[1][i] (op) ... on the stream. `sources` is read
// before this returns. `destination` may be one of the sources. 1 <= num_sources <= kMaxSlots.
cudaError_t reduce_slots(void* destination, const void* const* sources, int64_t num_sources,
                         int64_t count, DataType dtype, ReduceOp op, cudaStream_t stream);

// Loads the kernels for sums of bfloat16 or float16 onto the current device. Otherwise CUDA loads
// them at the first call and may wait for running kernels.
cudaError_t load_reduce_slots(DataType dtype);

}  // namespace axonn::kernels::cuda
