// A sum that is stored at every rank as it is computed.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/fused/sum_broadcast.h"

namespace axonn::kernels::sm90 {

// Enqueues the sum. The slots must be complete before it starts; peers may learn of the sum only
// after it. Returns cudaErrorInvalidValue if `sum` breaks SumToAll's rules.
cudaError_t sum_to_all(const cuda::SumToAll& sum, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_sum_to_all();

}  // namespace axonn::kernels::sm90
