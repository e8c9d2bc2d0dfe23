// Finds a device's fused GEMMs, and the best launch config for a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/fused/tile_choice.h"
#include "core/gemm/gemm_source.h"
#include "core/gemm/launch_config.h"

namespace axonn::ops::cuda {

// Returns where the device's fused GEMMs come from: CUTLASS, Triton or nowhere.
kernels::GemmSource gemm_source(c10::Device device);

// Returns why the device has no fused GEMMs; an empty string if it has.
std::string why_no_gemm_backend(c10::Device device);

// Returns the device's fused GEMMs; raises NotImplementedError if there are none. `op` opens the
// message. The first call for a device loads its kernels.
const kernels::cuda::GemmBackend& gemm_backend(const char* op, c10::Device device);

// Returns the config that choose_tile chooses; only the grid for a backend that chooses tiles by
// itself. Raises NotImplementedError if none is legal.
kernels::LaunchConfig choose_config(const char* op, const kernels::cuda::FusedGemm& gemm,
                                    c10::Device device, const kernels::Residency& residency,
                                    const kernels::cuda::Traffic& traffic = {});

// Returns the configs between which choose_config chooses for a product without communication, each
// with its modelled time. Raises NotImplementedError for a backend that chooses tiles by itself.
std::vector<kernels::ModelledConfig> product_configs(const char* op,
                                                     const kernels::cuda::FusedGemm& gemm,
                                                     c10::Device device);

// Returns the config with this tile (LaunchConfig::tile). If there is none, raises a ValueError
// that lists the tiles.
kernels::LaunchConfig config_of_tile(const char* op, const kernels::cuda::FusedGemm& gemm,
                                     c10::Device device, const std::string& tile);

}  // namespace axonn::ops::cuda
