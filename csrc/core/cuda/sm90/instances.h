// Lists the instances of the sm_90 GEMM that are built (each layout and dtype below, with each tile
// of core/gemm/sm90_tiles.h), and runs the one that matches a call.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "core/cuda/fused/fused_gemm.h"
#include "core/gemm/launch_config.h"

namespace axonn::kernels::sm90 {

struct Instance {
  DataType dtype;
  bool a_transposed, b_transposed;
  bool departs;
  LaunchConfig config;  // without num_ctas
  cudaError_t (*launch)(const cuda::FusedGemm&, const LaunchConfig&, cudaStream_t);
  cudaError_t (*load)();  // onto the current device
};

// tn: A [m, k] and B stored as [n, k], for y = x @ weight.t(). nn: B stored as [k, n], for dx = dy
// @ weight. nt: A stored as [k, m], for dweight = dy.t() @ x. Each has its own file,
// gemm_*_sm90.cu, so that they compile in parallel.
std::vector<Instance> gemm_bf16_tn();
std::vector<Instance> gemm_bf16_nn();
std::vector<Instance> gemm_bf16_nt();
std::vector<Instance> gemm_f16_tn();
std::vector<Instance> gemm_f16_nn();
std::vector<Instance> gemm_f16_nt();

// Returns all instances.
const std::vector<Instance>& instances();

// Loads all instances, and the other kernels for sm_90, onto the current device.
cudaError_t load();

// Enqueues the product. `config` is an instance's config, with num_ctas set. Returns
// cudaErrorInvalidValue if why_unsupported gives a reason, or if no instance has the config.
cudaError_t fused_gemm(const cuda::FusedGemm& gemm, const LaunchConfig& config,
                       cudaStream_t stream);

}  // namespace axonn::kernels::sm90
