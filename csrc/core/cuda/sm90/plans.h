// What a FusedGemm means to a kernel of given tiles: its plans, laid out as the warps read them.
// Host code without CUDA's headers, so that CPU tests cover it.
#pragma once

#include <cstdint>

#include "core/cuda/fused/fused_gemm.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/host_device.h"
#include "core/schedule/tile_order.h"

namespace axonn::kernels::sm90 {

// Arrivals by the ordinal of their chunk; a lane of the producer warp stands for each.
struct ArrivalPlan {
  cuda::Arriving dim;
  int32_t count;                        // of the dimension
  int32_t num_chunks;                   // 1 to kMaxChunks
  int32_t chunks_per_shard;             // for messages
  int32_t first_block;                  // along K: where a tile's sum begins
  int32_t chunk_end[cuda::kMaxChunks];  // position behind each chunk; never falls
  const void* pad;
  const uint32_t* epoch;
  cuda::SpinLimit limit;

  // A bit for each of the first `number` chunks.
  AXONN_HOST_DEVICE static constexpr uint32_t first(int number) {
    return number >= 32 ? ~uint32_t{0} : (uint32_t{1} << number) - 1;
  }
  AXONN_HOST_DEVICE constexpr uint32_t all() const { return first(num_chunks); }

  // A walk along K that stands at `tile`, whose last element lies in `chunk`, may go on without
  // another wait up to here.
  AXONN_HOST_DEVICE constexpr int stop(int chunk, int tile, int block_k, int num_tiles) const {
    const int end = chunk_end[chunk];
    if (end == count) return num_tiles;
    return end / block_k > tile ? end / block_k : tile + 1;
  }
};

// The chunks of a destination's rows, alike for all destinations.
struct DeparturePlan {
  int32_t num_ranks;
  int32_t rank;
  int32_t chunks_per_shard;
  int32_t row_end[comm::kMaxChunksPerShard];     // in tiles: behind the last row of tiles of each
  uint32_t num_tiles[comm::kMaxChunksPerShard];  // in each
  void* slots[cuda::kMaxPeers];
  void* pads[cuda::kMaxPeers];
  uint32_t* counters;
  const uint32_t* epoch;
};

// The order in which tiles are worked on, in clusters of them: own rows (columns) first where they
// arrive, the next rank's first and the own ones last where they leave.
struct TileGrid {
  TileOrder order;
  bool along_columns;
};

// Why no kernel computes it; null: one does.
const char* why_unsupported(const cuda::FusedGemm& gemm);

// Of a supported GEMM.
ArrivalPlan arrival_plan(const cuda::FusedGemm& gemm, const LaunchConfig& config);
DeparturePlan departure_plan(const cuda::FusedGemm& gemm, const LaunchConfig& config);
TileGrid tile_grid(const cuda::FusedGemm& gemm, const LaunchConfig& config);

}  // namespace axonn::kernels::sm90
