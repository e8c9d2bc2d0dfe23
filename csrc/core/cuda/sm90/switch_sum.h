// The sum of an all-reduce that the switch between the GPUs adds up while the GEMM goes on.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/fused/handshake.h"
#include "core/cuda/fused/switch_sum.h"

namespace axonn::kernels::sm90 {

// Enqueues the sum. It waits for the parts by their flags, so it runs beside the GEMM, on another
// stream. Returns cudaErrorInvalidValue for what SwitchSum does not allow.
cudaError_t sum_in_switch(const cuda::Peers& peers, const cuda::SwitchSum& sum,
                          cudaStream_t stream);

// Loads its kernels onto the current device.
cudaError_t load_switch_sum();

}  // namespace axonn::kernels::sm90
