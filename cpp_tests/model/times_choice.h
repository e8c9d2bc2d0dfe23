// The tiles that a product may be cut into, and the tile grids that csrc/core makes of them.
#pragma once

#include <vector>

#include "core/cuda/fused/fused_gemm.h"
#include "model/times_designs.h"
#include "model/times_gemm.h"
#include "model/times_work.h"

namespace axonn::times {

// The L2 rate that best_config assumed before (m), in bytes per cycle per SM.
inline constexpr double kGuessedL2 = 64;

// kInParts also stays on this rank, and is announced in parts.
enum class Flow { kStays, kArrives, kDeparts, kInParts };

// The product as csrc/core describes it, on rank 0.
kernels::cuda::FusedGemm gemm_of(const Work& work, Flow flow);

// The order of its tiles, by tile_grid (core/cuda/sm90/plans.h).
GemmGrid grid_of(const Work& work, Flow flow, const kernels::LaunchConfig& config);

// Returns the tiles that a call of this design may use: the one that best_config picks, or with (g)
// all that its kernel could have; or the tiles that the design names. If rows depart, a chunk of
// them must be whole clusters of tiles.
std::vector<kernels::LaunchConfig> choices(const Work& work, const Design& design, Flow flow,
                                           const kernels::Link& link = kernels::kNvlink);

// Returns a tile that runs on all SMs; it need not be one that is built.
kernels::LaunchConfig tile_of(int64_t block_m, int64_t block_n, int64_t cluster_m,
                              int64_t cluster_n, kernels::Schedule schedule);

// The tiles from which a library is assumed to make the best choice.
std::vector<kernels::LaunchConfig> library_tiles();

}  // namespace axonn::times
