#include "model/times_choice.h"

#include <algorithm>

#include "core/cuda/fused/switch_sum.h"
#include "core/cuda/sm90/plans.h"
#include "core/gemm/launch_config.h"

namespace axonn::times {
namespace {

using kernels::LaunchConfig;
using kernels::cuda::FusedGemm;

LaunchConfig config(int64_t block_m, int64_t block_n, int64_t cluster_m, int64_t cluster_n) {
  const int64_t ctas = cluster_m * cluster_n;
  return {block_m, block_n, 64, 4, 8, 4, cluster_m, cluster_n, kNumSms / ctas * ctas};
}

}  // namespace

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

GemmGrid grid_of(const Work& work, Flow flow, const TileKind& kind) {
  const FusedGemm gemm = gemm_of(work, flow);
  const auto grid = kernels::sm90::tile_grid(gemm, kind.config);
  const int64_t batches = std::max(gemm.departures.num_ranks, 1);
  return {kind, grid.order, grid.along_columns, 1, work.m / batches, work.n, work.k};
}

std::vector<TileKind> library_tiles() {
  std::vector<TileKind> result;
  for (const auto& [m, n] : {std::pair{128, 256}, {256, 128}, {128, 192}, {128, 128}}) {
    result.push_back({config(m, n, 2, 1), Schedule::kCooperative});
    result.push_back({config(m, n, 1, 2), Schedule::kCooperative});
  }
  for (const auto& [m, n] : {std::pair{64, 256}, {64, 192}, {64, 128}, {128, 128}}) {
    result.push_back({config(m, n, 2, 1), Schedule::kPingpong});
    result.push_back({config(m, n, 1, 2), Schedule::kPingpong});
    result.push_back({config(m, n, 1, 1), Schedule::kPingpong});
  }
  return result;
}

std::vector<TileKind> choices(const Work& work, const Design& design, bool departs) {
  if (design.more_tiles) {
    std::vector<TileKind> result;
    for (const TileKind& kind : library_tiles()) {
      const int64_t rows = kind.config.block_m * kind.config.cluster_m;
      if (!departs || kernels::cuda::kChunkRows % rows == 0) result.push_back(kind);
    }
    return result;
  }
  auto limits = kernels::kSm90;
  if (!design.likely_l2) limits.l2_bytes_per_cycle = kGuessedL2;
  const auto best = kernels::best_config({.m = work.m, .n = work.n, .k = work.k}, {}, limits);
  return {{best.value(), Schedule::kCooperative}};
}

}  // namespace axonn::times
