// The tiles of the GEMMs for sm_90. core/cuda/sm90 builds its kernels from this list, and
// candidates() chooses from it. So a new tile is a new line here, and a line that the hardware
// cannot run does not compile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/gemm/config_rules.h"
#include "core/gemm/launch_config.h"

namespace axonn::kernels {

struct Sm90Tile {
  int block_m;
  int block_n;
  int num_stages;  // as many as fit, at most kMaxStages; gemm.cuh checks that CUTLASS fits them
  int cluster_m;   // CTAs that share loads of B
  int cluster_n;   // CTAs that share loads of A
  Schedule schedule;
};

inline constexpr Sm90Tile kSm90Tiles[] = {
    // block_m, block_n, num_stages, cluster_m, cluster_n, schedule, and what it is good for
    {128, 256, 4, 2, 1, Schedule::kCooperative},  // large products: fewest loads per flop
    {128, 128, 6, 1, 2, Schedule::kPingpong},     // few rows, short K, a last wave of few tiles
    {64, 128, 8, 2, 1, Schedule::kPingpong},      // rows that arrive late, small products
};

inline constexpr std::size_t kNumSm90Tiles = sizeof(kSm90Tiles) / sizeof(Sm90Tile);

// Two warpgroups multiply and one loads, in each of CUTLASS's schedules.
inline constexpr int64_t kSm90MathWarps = 8;
inline constexpr int64_t kSm90ProducerWarps = 4;
// A row of a stage is one swizzled line of TMA.
inline constexpr int64_t kSm90StageRowBytes = 128;
// The kernels are built for bfloat16 and float16.
inline constexpr int64_t kSm90ElementBytes = 2;

// Returns the tile's config for elements of this size; num_ctas is not set.
constexpr LaunchConfig config_of(const Sm90Tile& tile, int64_t element_bytes) {
  return {.block_m = tile.block_m,
          .block_n = tile.block_n,
          .block_k = kSm90StageRowBytes / element_bytes,
          .num_stages = tile.num_stages,
          .num_math_warps = kSm90MathWarps,
          .num_producer_warps = kSm90ProducerWarps,
          .cluster_m = tile.cluster_m,
          .cluster_n = tile.cluster_n,
          .schedule = tile.schedule};
}

// Returns whether `rule(config)` holds for every tile of the list.
template <typename Rule>
constexpr bool every_sm90_tile(Rule rule) {
  for (const Sm90Tile& tile : kSm90Tiles) {
    if (!rule(config_of(tile, kSm90ElementBytes))) return false;
  }
  return true;
}

static_assert(every_sm90_tile([](const LaunchConfig& c) { return has_positive_sizes(c); }),
              "kSm90Tiles: every size must be positive");
static_assert(every_sm90_tile([](const LaunchConfig& c) {
                return depth_is_whole_instructions(c, kSm90ElementBytes, kSm90) &&
                       warps_are_whole_groups(c, kSm90) && edges_are_whole_instructions(c, kSm90);
              }),
              "kSm90Tiles: block_m must be a multiple of 64 rows for each of the warpgroups that "
              "share a tile (one in pingpong, otherwise two), and block_n a multiple of 8");
static_assert(every_sm90_tile([](const LaunchConfig& c) { return fits_one_load(c, kSm90); }),
              "kSm90Tiles: block_m and block_n must be at most 256, the edge of one TMA load");
static_assert(every_sm90_tile([](const LaunchConfig& c) { return fits_registers(c, kSm90); }),
              "kSm90Tiles: the accumulators of a tile must fit the registers of its math warps");
static_assert(every_sm90_tile([](const LaunchConfig& c) {
                return has_possible_stages(c) && fits_threads(c, kSm90);
              }),
              "kSm90Tiles: num_stages must be 2 to 8");
static_assert(every_sm90_tile([](const LaunchConfig& c) {
                return fits_shared_memory(c, kSm90ElementBytes, kSm90);
              }),
              "kSm90Tiles: the stages and the tile on its way out must fit the shared memory of an "
              "SM: fewer stages, or a smaller tile");
static_assert(every_sm90_tile([](const LaunchConfig& c) { return fits_cluster(c, kSm90); }),
              "kSm90Tiles: a cluster has at most 8 CTAs");

}  // namespace axonn::kernels
