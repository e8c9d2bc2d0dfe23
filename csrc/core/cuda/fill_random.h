// Device version of fill_random (csrc/core/numeric/philox.h).
#pragma once

#include <cuda_runtime_api.h>

#include "core/numeric/block_layout.h"
#include "core/numeric/data_type.h"
#include "core/numeric/philox.h"

namespace axonn::kernels::cuda {

// Fills a contiguous block with the elements that `layout` assigns to it. Only enqueues the
// work.
cudaError_t fill_random(void* out, const BlockLayout& layout, DataType dtype,
                        const RandomStream& stream, cudaStream_t cuda_stream);

}  // namespace axonn::kernels::cuda
