// An architecture's rules for a config, one function per rule, so that the compiler can check
// them, too (sm90_tiles.h). why_illegal (launch_config.h) says with numbers which rule a config
// breaks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/gemm/launch_config.h"

namespace axonn::kernels {

inline constexpr int64_t kThreadsPerWarp = 32;
inline constexpr int64_t kMaxStages = 8;

// Returns the number of tiles that a CTA works on at a time.
constexpr int64_t tiles_in_turn(const LaunchConfig& config) {
  return config.schedule == Schedule::kPingpong ? 2 : 1;
}

// Returns the number of warps that share a tile's accumulators.
constexpr int64_t math_warps_per_tile(const LaunchConfig& config) {
  return config.num_math_warps / tiles_in_turn(config);
}

// Returns the number of warp groups of a tile; each group issues its own instructions.
constexpr int64_t num_math_groups(const LaunchConfig& config, const DeviceLimits& limits) {
  return math_warps_per_tile(config) / limits.warps_per_mma;
}

// A tile's rows must be a multiple of this, because its warpgroups split them.
constexpr int64_t step_m(const LaunchConfig& config, const DeviceLimits& limits) {
  return limits.mma_m * num_math_groups(config, limits);
}

constexpr int64_t accumulators_per_thread(const LaunchConfig& config) {
  return config.block_m * config.block_n / (math_warps_per_tile(config) * kThreadsPerWarp);
}

constexpr int64_t threads_per_block(const LaunchConfig& config) {
  return (config.num_math_warps + config.num_producer_warps) * kThreadsPerWarp;
}

constexpr int64_t ctas_per_cluster(const LaunchConfig& config) {
  return config.cluster_m * config.cluster_n;
}

constexpr bool has_positive_sizes(const LaunchConfig& config) {
  return std::min({config.block_m, config.block_n, config.block_k, config.num_math_warps,
                   config.cluster_m, config.cluster_n}) >= 1 &&
         config.num_producer_warps >= 0;
}

// --- Whether the architecture's instructions can multiply the tile -------------------------------

constexpr bool depth_is_whole_instructions(const LaunchConfig& config, int64_t element_bytes,
                                           const DeviceLimits& limits) {
  return config.block_k * element_bytes % limits.mma_k_bytes == 0;
}

constexpr bool warps_are_whole_groups(const LaunchConfig& config, const DeviceLimits& limits) {
  return config.num_math_warps % (limits.warps_per_mma * tiles_in_turn(config)) == 0;
}

constexpr bool edges_are_whole_instructions(const LaunchConfig& config,
                                            const DeviceLimits& limits) {
  return config.block_m % step_m(config, limits) == 0 && config.block_n % limits.mma_n == 0;
}

constexpr bool fits_one_load(const LaunchConfig& config, const DeviceLimits& limits) {
  return std::max(config.block_m, config.block_n) <= limits.max_box;
}

constexpr bool fits_registers(const LaunchConfig& config, const DeviceLimits& limits) {
  return accumulators_per_thread(config) <= limits.max_accumulators;
}

// --- Whether a CTA fits on an SM, and a cluster on the device ------------------------------------

constexpr bool fits_threads(const LaunchConfig& config, const DeviceLimits& limits) {
  return threads_per_block(config) <= limits.threads_per_block;
}

constexpr bool has_possible_stages(const LaunchConfig& config) {
  return config.num_stages >= 2 && config.num_stages <= kMaxStages;
}

constexpr bool fits_shared_memory(const LaunchConfig& config, int64_t element_bytes,
                                  const DeviceLimits& limits) {
  return shared_bytes(config, element_bytes) <= limits.shared_bytes_per_block;
}

constexpr bool fits_cluster(const LaunchConfig& config, const DeviceLimits& limits) {
  return ctas_per_cluster(config) <= limits.max_cluster;
}

}  // namespace axonn::kernels
