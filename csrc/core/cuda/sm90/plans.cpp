#include "core/cuda/sm90/plans.h"

#include <algorithm>

#include "core/gemm/sm90_tiles.h"
#include "core/schedule/partition.h"
#include "core/schedule/tile_schedule.h"

namespace axonn::kernels::sm90 {
namespace {

using comm::ceil_div;
using cuda::Arriving;

// Rows (columns) of tiles that are worked on before the next tile across, so that both operands of
// the tiles in flight fit in L2. With K = 8192 in bf16, 8 clusters of 256 rows, as tiles of 256
// columns have, take 34 MB of the H100's 50 MB, and 8 of 128 rows take 17 MB. A guess.
constexpr int64_t kMaxGroup = 8;

static_assert(every_sm90_tile([](const LaunchConfig& c) {
                return cuda::kChunkRows % (c.block_m * c.cluster_m) == 0 &&
                       cuda::kChunkRows % (c.block_n * c.cluster_n) == 0;
              }),
              "kSm90Tiles: a chunk of kChunkRows rows must be whole clusters of tiles");
static_assert(every_sm90_tile([](const LaunchConfig& c) {
                return cuda::kPartRows % c.block_m == 0;
              }),
              "kSm90Tiles: the rows that leave are cut at kPartRows, which must be whole tiles");

// Returns how many tiles of `block` elements take turns if a chunk has `chunk` elements: no more
// than arrive (or leave) together, because otherwise the first would wait for the last.
int64_t group_of(int64_t chunk, int64_t block) {
  return std::clamp<int64_t>(chunk / block, 1, kMaxGroup);
}

}  // namespace

ArrivalPlan arrival_plan(const cuda::FusedGemm& gemm, const LaunchConfig& config) {
  const cuda::Arrivals& arrivals = gemm.arrivals;
  ArrivalPlan result{};
  result.dim = arrivals.dim;
  if (arrivals.dim == Arriving::kNothing) return result;
  const comm::ChunkPlan& plan = arrivals.plan;
  result.count = static_cast<int32_t>(plan.count);
  result.num_chunks = static_cast<int32_t>(plan.num_chunks());
  result.chunks_per_shard = static_cast<int32_t>(plan.chunks_per_shard);
  for (int64_t shard = 0; shard < plan.num_shards; ++shard) {
    for (int64_t chunk = 0; chunk < plan.chunks_per_shard; ++chunk) {
      result.chunk_end[plan.ordinal({shard, chunk})] =
          static_cast<int32_t>(plan.chunk({shard, chunk}).end);
    }
  }
  if (arrivals.dim == Arriving::kInner) {
    const GatherTiles blocks{plan, arrivals.rank, config.block_k, 1};
    result.first_block = static_cast<int32_t>(blocks.num_tiles() > 0 ? blocks.along(0) : 0);
  }
  result.pad = arrivals.pad;
  result.epoch = arrivals.epoch;
  result.limit = arrivals.limit;
  return result;
}

DeparturePlan departure_plan(const cuda::FusedGemm& gemm, const LaunchConfig& config) {
  const cuda::Departures& departures = gemm.departures;
  DeparturePlan result{};
  result.num_ranks = departures.num_ranks;
  result.rank = departures.rank;
  result.chunks_per_shard = departures.chunks_per_shard;
  const comm::ChunkPlan rows{gemm.m / departures.num_ranks, 1, departures.chunks_per_shard,
                             cuda::kPartRows};
  for (int64_t chunk = 0; chunk < departures.chunks_per_shard; ++chunk) {
    const comm::Range range = rows.chunk({0, chunk});
    result.row_end[chunk] = static_cast<int32_t>(ceil_div(range.end, config.block_m));
    result.num_tiles[chunk] = static_cast<uint32_t>(ceil_div(range.size(), config.block_m) *
                                                    ceil_div(gemm.n, config.block_n));
  }
  std::copy(std::begin(departures.slots), std::end(departures.slots), result.slots);
  std::copy(std::begin(departures.pads), std::end(departures.pads), result.pads);
  result.counters = departures.counters;
  result.epoch = departures.epoch;
  return result;
}

TileGrid tile_grid(const cuda::FusedGemm& gemm, const LaunchConfig& config) {
  const bool departs = gemm.departures.num_ranks > 0;
  const bool columns = gemm.arrivals.dim == Arriving::kColumns;
  const int64_t batches = departs ? gemm.departures.num_ranks : 1;
  const int64_t block_m = config.block_m * config.cluster_m;
  const int64_t block_n = config.block_n * config.cluster_n;
  const int64_t tiles_m = ceil_div(gemm.m / batches, block_m);
  const int64_t tiles_n = ceil_div(gemm.n, block_n);
  const int64_t block = columns ? block_n : block_m;

  TileGrid grid{.order = {}, .along_columns = columns};
  TileOrder& order = grid.order;
  order.along = static_cast<uint32_t>(columns ? tiles_n : tiles_m);
  order.across = static_cast<uint32_t>(columns ? tiles_m : tiles_n);
  order.batches = static_cast<uint32_t>(batches);
  order.group = static_cast<uint32_t>(kMaxGroup);
  if (departs) {
    order.first_batch = static_cast<uint32_t>(comm::own_last(gemm.departures.rank, batches, 0));
    order.group =
        static_cast<uint32_t>(group_of(gemm.m / batches / gemm.departures.chunks_per_shard, block));
  } else if (gemm.arrivals.dim == Arriving::kRows || columns) {
    const comm::ChunkPlan& plan = gemm.arrivals.plan;
    const GatherTiles tiles{plan, gemm.arrivals.rank, block, 1};
    order.first = static_cast<uint32_t>(tiles.num_tiles() > 0 ? tiles.along(0) : 0);
    order.group = static_cast<uint32_t>(group_of(ceil_div(plan.count, plan.num_chunks()), block));
  }
  return grid;
}

}  // namespace axonn::kernels::sm90
