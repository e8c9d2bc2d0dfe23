// A write of a value by a stream's own queue, which needs neither an SM nor a copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace axonn::kernels::cuda {

// Finds the driver's function. It is to be called before the first write.
void load_write_value();

// Enqueues a write of `value` to memory of this GPU, or of one whose memory this one has mapped, if
// the driver can write there (write_probe.h). Whoever sees the value sees what the stream did
// before. The value is fixed now, also where a graph captures the write. Returns
// cudaErrorNotSupported, and enqueues nothing, where the driver has no such writes. Source:
// cuStreamWriteValue32 in the CUDA driver's manual.
cudaError_t write_value(void* to, uint32_t value, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
