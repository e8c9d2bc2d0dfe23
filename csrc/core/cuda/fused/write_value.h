// A write by a stream's own queue, which needs neither an SM nor a copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace axonn::kernels::cuda {

// Looks up the driver's function. Must be called before the first write.
void load_write_value();

// Enqueues a write of `value` to memory of this GPU, or of a GPU whose memory this one has mapped,
// if the driver can write there (write_probe.h). Readers that see the value also see the stream's
// earlier work. The value is fixed now, even if a graph captures the write. If the driver does not
// support such writes, returns cudaErrorNotSupported and enqueues nothing. Source:
// cuStreamWriteValue32 in the CUDA driver's manual.
cudaError_t write_value(void* to, uint32_t value, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
