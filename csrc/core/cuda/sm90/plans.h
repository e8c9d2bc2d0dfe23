// Derives a kernel's plans for its tiles from a FusedGemm, laid out as the warps read them. This is
// host code without CUDA headers, so that CPU tests cover it.
#pragma once

#include <cstdint>

#include "core/cuda/fused/fused_gemm.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/host_device.h"
#include "core/schedule/tile_order.h"

namespace axonn::kernels::sm90 {

// Arrivals, indexed by the chunk's ordinal; one lane of the producer warp handles each chunk.
struct ArrivalPlan {
  cuda::Arriving dim;
  int32_t count;                        // size of the dimension
  int32_t num_chunks;                   // 1 to kMaxChunks
  int32_t chunks_per_shard;             // for error messages
  int32_t first_block;                  // along K: the block at which a tile's sum begins
  int32_t chunk_end[cuda::kMaxChunks];  // end position of each chunk; never decreases
  const void* pad;
  const uint32_t* epoch;
  cuda::SpinLimit limit;

  // Returns a mask of the first `number` chunks.
  AXONN_HOST_DEVICE static constexpr uint32_t first(int number) {
    return number >= 32 ? ~uint32_t{0} : (uint32_t{1} << number) - 1;
  }
  AXONN_HOST_DEVICE constexpr uint32_t all() const { return first(num_chunks); }

  // Returns the K tile up to which loads may go on without another wait, starting at `tile`, whose
  // last element lies in `chunk`.
  AXONN_HOST_DEVICE constexpr int stop(int chunk, int tile, int block_k, int num_tiles) const {
    const int end = chunk_end[chunk];
    if (end == count) return num_tiles;
    return end / block_k > tile ? end / block_k : tile + 1;
  }
};

// The chunks of a destination's rows, the same for all destinations.
struct DeparturePlan {
  int32_t num_ranks;
  int32_t rank;
  int32_t chunks_per_shard;
  int32_t row_end[comm::kMaxChunksPerShard];     // end of each chunk, in rows of tiles
  uint32_t num_tiles[comm::kMaxChunksPerShard];  // in each chunk
  void* slots[cuda::kMaxPeers];
  void* pads[cuda::kMaxPeers];
  uint32_t* counters;
  const uint32_t* epoch;
};

// The order in which clusters of tiles are worked on. If rows (columns) arrive, this rank's own
// come first; if rows leave, the next rank's come first and this rank's own last.
struct TileGrid {
  TileOrder order;
  bool along_columns;
};

// Returns why no kernel supports the GEMM, or null if one does.
const char* why_unsupported(const cuda::FusedGemm& gemm);

// These return the plans of a supported GEMM.
ArrivalPlan arrival_plan(const cuda::FusedGemm& gemm, const LaunchConfig& config);
DeparturePlan departure_plan(const cuda::FusedGemm& gemm, const LaunchConfig& config);
TileGrid tile_grid(const cuda::FusedGemm& gemm, const LaunchConfig& config);

}  // namespace axonn::kernels::sm90
