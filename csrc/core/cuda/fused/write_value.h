// A write of a value by a stream's own queue, which needs neither an SM nor a copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace axonn::kernels::cuda {

// Returns whether the driver has write_value.
bool can_write_values();

// Enqueues a write of `value` to device memory of this GPU or of one that it reaches. Whoever sees
// the value sees what the stream did before. The value is fixed now, also where a graph captures
// the write. Source: cuStreamWriteValue32 in the CUDA driver's manual.
cudaError_t write_value(void* to, uint32_t value, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
