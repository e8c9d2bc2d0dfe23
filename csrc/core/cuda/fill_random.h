// fill_random of csrc/core/numeric/philox.h, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include "core/numeric/block_layout.h"
#include "core/numeric/data_type.h"
#include "core/numeric/philox.h"

namespace axonn::kernels::cuda {

// Fills a contiguous block with the elements that `layout` says it holds. It only enqueues the
// work.
cudaError_t fill_random(void* out, const BlockLayout& layout, DataType dtype,
                        const RandomStream& stream, cudaStream_t cuda_stream);

}  // namespace axonn::kernels::cuda
