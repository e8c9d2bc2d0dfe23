#include "model/times_choice.h"

#include <algorithm>

#include "core/cuda/fused/switch_sum.h"
#include "core/cuda/fused/tile_choice.h"
#include "core/cuda/sm90/plans.h"
#include "core/gemm/launch_config.h"

namespace axonn::times {

using kernels::LaunchConfig;
using kernels::Schedule;
using kernels::cuda::FusedGemm;

LaunchConfig tile_of(int64_t block_m, int64_t block_n, int64_t cluster_m, int64_t cluster_n,
                     Schedule schedule) {
  const int64_t ctas = cluster_m * cluster_n;
  return {block_m, block_n, 64, 4, 8, 4, cluster_m, cluster_n, kNumSms / ctas * ctas, schedule};
}

FusedGemm gemm_of(const Work& work, Flow flow) {
  FusedGemm gemm{};
  gemm.m = work.m;
  gemm.n = work.n;
  gemm.k = work.k;
  gemm.dtype = kernels::DataType::kBFloat16;
  const int32_t chunks = kernels::cuda::chunks_per_shard(work.m / work.ranks);
  if (flow == Flow::kArrives) {
    gemm.arrivals.dim = kernels::cuda::Arriving::kRows;
    gemm.arrivals.plan = {work.m, work.ranks, chunks};
  } else if (flow == Flow::kDeparts) {
    gemm.departures.num_ranks = work.ranks;
    gemm.departures.chunks_per_shard = chunks;
  } else if (flow == Flow::kInParts) {
    const auto parts = kernels::cuda::SwitchParts::of(work.m);
    gemm.departures.num_ranks = parts.batches;
    gemm.departures.rank = parts.batches - 1;
    gemm.departures.chunks_per_shard = parts.chunks_per_batch;
  }
  return gemm;
}

GemmGrid grid_of(const Work& work, Flow flow, const LaunchConfig& config) {
  const FusedGemm gemm = gemm_of(work, flow);
  const auto grid = kernels::sm90::tile_grid(gemm, config);
  const int64_t batches = std::max(gemm.departures.num_ranks, 1);
  return {config, grid.order, grid.along_columns, 1, work.m / batches, work.n, work.k};
}

std::vector<LaunchConfig> library_tiles() {
  std::vector<LaunchConfig> result;
  for (const auto& [m, n] : {std::pair{128, 256}, {256, 128}, {128, 192}, {128, 128}}) {
    result.push_back(tile_of(m, n, 2, 1, Schedule::kCooperative));
    result.push_back(tile_of(m, n, 1, 2, Schedule::kCooperative));
  }
  for (const auto& [m, n] : {std::pair{64, 256}, {64, 192}, {64, 128}, {128, 128}}) {
    result.push_back(tile_of(m, n, 2, 1, Schedule::kPingpong));
    result.push_back(tile_of(m, n, 1, 2, Schedule::kPingpong));
    result.push_back(tile_of(m, n, 1, 1, Schedule::kPingpong));
  }
  return result;
}

std::vector<LaunchConfig> choices(const Work& work, const Design& design, Flow flow,
                                  const kernels::Link& link) {
  const bool departs = flow == Flow::kDeparts || flow == Flow::kInParts;
  if (!design.tiles.empty()) return design.tiles;
  if (design.more_tiles) {
    std::vector<LaunchConfig> result;
    for (const LaunchConfig& tile : library_tiles()) {
      const int64_t rows = tile.block_m * tile.cluster_m;
      if (!departs || kernels::cuda::kChunkRows % rows == 0) result.push_back(tile);
    }
    return result;
  }
  auto limits = kernels::kSm90;
  if (!design.likely_l2) limits.l2_bytes_per_cycle = kGuessedL2;
  kernels::cuda::Traffic traffic{.num_ranks = departs ? work.ranks : 1,
                                 .in_switch = flow == Flow::kInParts};
  if (design.informed && flow == Flow::kArrives) {
    traffic.arriving =
        arriving_chunks(kernels::cuda::Arriving::kRows, gemm_of(work, flow).arrivals.plan,
                        work.k * kElementBytes, link);
  }
  constexpr kernels::Link kNoTime{.copy_gbps = 1e9, .chunk_us = 0, .store_gbps = 1e9};
  const auto best = kernels::cuda::choose_tile(gemm_of(work, Flow::kStays), traffic,
                                               {.link = design.informed ? link : kNoTime}, limits);
  return {best.value()};
}

}  // namespace axonn::times
