// Finds the fused GEMMs of a device's architecture, and the launch that is best for a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "core/cuda/fused/fused_calls.h"
#include "core/gemm/gemm_source.h"
#include "core/gemm/launch_config.h"

namespace axonn::ops::cuda {

// Returns who has the device's fused GEMMs.
kernels::GemmSource gemm_source(c10::Device device);

// Returns why the device has no fused GEMMs; an empty text if it has.
std::string why_no_gemm_backend(c10::Device device);

// Returns the device's fused GEMMs; raises NotImplementedError if there are none. `op` opens the
// message. The first call for a device loads its kernels.
const kernels::cuda::GemmBackend& gemm_backend(const char* op, c10::Device device);

// What of a product arrives, and how its rows leave.
struct Flow {
  kernels::ArrivingChunks arriving{};
  int64_t num_ranks = 1;   // to which the rows go
  bool in_switch = false;  // where they are added up, which may take SMs of its own
};

// Returns the config with the least modelled cost, on the largest grid that leaves room on the
// device for those that it waits for; the grid alone for a backend that chooses tiles by itself.
// Raises NotImplementedError if none is legal.
kernels::LaunchConfig choose_config(const char* op, const kernels::cuda::FusedGemm& gemm,
                                    c10::Device device, const kernels::Residency& residency,
                                    const Flow& flow = {});

}  // namespace axonn::ops::cuda
