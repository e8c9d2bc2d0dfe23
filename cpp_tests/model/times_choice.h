// The tiles that a product may be cut into, and the grids of tiles that csrc/core makes of them.
#pragma once

#include <vector>

#include "core/cuda/fused/fused_gemm.h"
#include "model/times_designs.h"
#include "model/times_gemm.h"
#include "model/times_work.h"

namespace axonn::times {

// What best_config assumed of the L2 rate before (m), in bytes per cycle and SM.
inline constexpr double kGuessedL2 = 64;

// The last one stays, too, and is announced in parts.
enum class Flow { kStays, kArrives, kDeparts, kInParts };

// The product as csrc/core describes it, on rank 0.
kernels::cuda::FusedGemm gemm_of(const Work& work, Flow flow);

// The order of its tiles, by tile_grid (core/cuda/sm90/plans.h).
GemmGrid grid_of(const Work& work, Flow flow, const kernels::LaunchConfig& config);

// The tiles among which a call of this design chooses: what best_config answers, or with (g) all
// that its kernel could have; or the design's own. Where rows depart, a chunk of them must be whole
// clusters of tiles.
std::vector<kernels::LaunchConfig> choices(const Work& work, const Design& design, Flow flow,
                                           const kernels::Link& link = kernels::kNvlink);

// A tile on all SMs; it need not be one that is built.
kernels::LaunchConfig tile_of(int64_t block_m, int64_t block_n, int64_t cluster_m,
                              int64_t cluster_n, kernels::Schedule schedule);

// The tiles among which a library is assumed to choose as well as can be.
std::vector<kernels::LaunchConfig> library_tiles();

}  // namespace axonn::times
