// Chooses the tile of a fused GEMM. This is plain host code without CUDA headers, so that CPU tests
// cover it.
#pragma once

#include <cstdint>
#include <optional>

#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/fused/switch_sum.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/data_type.h"

namespace axonn::kernels::cuda {

// Which operand arrives during the GEMM, and where its output rows go.
struct Traffic {
  ArrivingChunks arriving{};
  int64_t num_ranks = 1;   // that the rows go to
  bool in_switch = false;  // the switch sums the rows, which may take SMs of its own
};

inline GemmProblem problem_of(const FusedGemm& gemm, const Traffic& traffic,
                              const Residency& residency) {
  return {.m = gemm.m,
          .n = gemm.n,
          .k = gemm.k,
          .element_bytes = size_of(gemm.dtype),
          .batches = traffic.num_ranks,
          .arriving = traffic.arriving,
          .leaving = leaving_rows(traffic.num_ranks, residency.link)};
}

// Returns the config with the lowest modelled cost, on the largest grid that leaves room on the
// device for the work that it waits for; none if no config is legal.
inline std::optional<LaunchConfig> choose_tile(const FusedGemm& gemm, const Traffic& traffic,
                                               const Residency& residency,
                                               const DeviceLimits& limits) {
  const GemmProblem problem = problem_of(gemm, traffic, residency);
  return traffic.in_switch ? best_config_beside_switch_sum(problem, residency, limits)
                           : best_config(problem, residency, limits);
}

}  // namespace axonn::kernels::cuda
