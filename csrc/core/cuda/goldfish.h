// goldfish_labels of csrc/core/numeric/goldfish.h, on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/numeric/goldfish.h"

namespace axonn::kernels::cuda {

// Writes the labels of all targets to out [rows, length - 1]. It only enqueues the work.
cudaError_t goldfish_labels(const GoldfishRows& rows, const GoldfishRule& rule,
                            int64_t ignore_index, int64_t* out, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
