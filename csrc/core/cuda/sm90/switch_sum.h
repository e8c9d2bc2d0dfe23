// The sum of an all-reduce, computed by the switch between the GPUs while the GEMM runs.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/fused/handshake.h"
#include "core/cuda/fused/switch_sum.h"

namespace axonn::kernels::sm90 {

// Enqueues the sum. It waits for each part's flags, so it runs next to the GEMM, on another stream.
// Returns cudaErrorInvalidValue if `sum` breaks SwitchSum's rules.
cudaError_t sum_in_switch(const cuda::Peers& peers, const cuda::SwitchSum& sum,
                          cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_switch_sum();

}  // namespace axonn::kernels::sm90
