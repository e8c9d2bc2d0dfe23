// The fused GEMMs of a device's architecture, and the launch that suits a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "core/cuda/fused/fused_calls.h"
#include "core/gemm/launch_config.h"

namespace axonn::ops::cuda {

// Why the device has no fused GEMMs; empty: it has.
std::string why_no_gemm_backend(c10::Device device);

// Raises NotImplementedError where there is none. `op` opens the message. The first call for a
// device loads its kernels.
const kernels::cuda::GemmBackend& gemm_backend(const char* op, c10::Device device);

// The config of least modelled cost, on the largest grid of the device that leaves room for those
// it waits for. Raises NotImplementedError if none is legal.
kernels::LaunchConfig choose_config(const char* op, const kernels::cuda::FusedGemm& gemm,
                                    c10::Device device, const kernels::Residency& residency);

}  // namespace axonn::ops::cuda
