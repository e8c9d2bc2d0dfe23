#include "model/times_hosts.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "model/times_calls.h"
#include "model/times_choice.h"
#include "model/times_library.h"

namespace axonn::times {
namespace {

using comm::ChunkPlan;
using kernels::TileOrder;

double d(int64_t value) { return static_cast<double>(value); }

double network_us(int64_t bytes, int64_t groups, const Rates& rates) {
  return d(groups) * rates.nccl_send_us + us_of(d(bytes), rates.network_gbps);
}

}  // namespace

double hosts_gather_us(const Work& work, const Design& design, const Rates& rates) {
  const kernels::LaunchConfig tile =
      choices(work, design, Flow::kArrives, kernels::kNetwork).front();
  const ChunkPlan plan = gemm_of(work, Flow::kArrives).arrivals.plan;
  std::vector<double> seen(static_cast<std::size_t>(plan.num_chunks()), 0);
  Server network;
  for (int64_t step = plan.chunks_per_shard; step < plan.num_chunks(); ++step) {
    const comm::ChunkIndex index = plan.gather_visit(0, step);
    const bool starts = !design.grouped || index.chunk == 0;
    const int64_t bytes = plan.chunk(index).size() * work.k * kElementBytes;
    network.serve(0, network_us(bytes, starts ? 1 : 0, rates));
    seen[static_cast<std::size_t>(plan.ordinal(index))] = network.free_us();
  }
  if (design.grouped) {  // the chunks of a group arrive when the whole group has
    for (int64_t chunk = plan.num_chunks() - 2; chunk >= plan.chunks_per_shard; --chunk) {
      const auto at = static_cast<std::size_t>(chunk);
      if ((chunk + 1) % plan.chunks_per_shard != 0) seen[at] = seen[at + 1];
    }
  }
  for (double& each : seen) each += rates.copy_us + rates.host_read_us + rates.seen_us;
  const int64_t rows = tile.block_m * tile.cluster_m;
  const auto arrival = [&](const TileOrder::Place& place) {
    const int64_t begin = static_cast<int64_t>(place.along) * rows;
    const auto span = plan.needed({begin, std::min(begin + rows, plan.count)});
    return *std::max_element(seen.begin() + span.first, seen.begin() + span.last + 1);
  };
  const double begin =
      3 * rates.kernel_us + us_of(2 * d(work.gathered_bytes() / work.ranks), rates.hbm_gbps);
  return run_gemm(grid_of(work, Flow::kArrives, tile), begin, arrival, {}, rates).end_us +
         rates.kernel_us;
}

double hosts_scatter_us(const Work& work, const Design& design, const Rates& rates) {
  const int64_t sent = work.result_bytes() / work.ranks * (work.ranks - 1);
  if (!design.over_hosts) return hosts_library_us(work, sent, rates);
  const kernels::LaunchConfig tile =
      choices(work, design, Flow::kDeparts, kernels::kNetwork).front();
  const GemmGrid grid = grid_of(work, Flow::kDeparts, tile);
  const GemmRun run = run_gemm(grid, 2 * rates.kernel_us, {}, {}, rates);
  const int64_t chunks = gemm_of(work, Flow::kDeparts).departures.chunks_per_shard;
  // Chunks of the other ranks' rows are finished one after another, at the pace of the tiles.
  Server network;
  const int64_t parts = chunks * work.ranks;
  for (int64_t part = 1; part <= parts - chunks; ++part) {
    const std::size_t last =
        run.tiles.size() * static_cast<std::size_t>(part) / static_cast<std::size_t>(parts);
    const double ready = run.tiles[std::max<std::size_t>(last, 1) - 1].announced_us;
    network.serve(ready, network_us(sent / (parts - chunks), 1, rates));
  }
  const double slot = d(work.result_bytes() / work.ranks);
  return std::max(run.end_us, network.free_us()) + 2 * rates.kernel_us +
         us_of(slot * (work.ranks + 1), rates.hbm_gbps);
}

double hosts_library_us(const Work& work, int64_t bytes, const Rates& rates) {
  return 2 * rates.kernel_us + cublas_us(work, rates) + rates.nccl_us + network_us(bytes, 0, rates);
}

std::vector<Both> linears() {
  std::vector<Both> result;
  for (const Layer& layer : kLayers) {
    for (const int64_t m : kRows) result.push_back({{m, layer.n / 2, layer.k / 4, 4}, 2});
  }
  return result;
}

double library_both_us(const Both& both, const Rates& rates) {
  return rates.kernel_us + nccl_gather_us(both.work.gathered_bytes(), both.gathers, rates) +
         library_scatter_us(both.work, rates);
}

double fused_both_us(const Both& both, const Design& design) {
  const Work& work = both.work;
  if (!design.both) {
    return kH100.kernel_us + nccl_gather_us(work.gathered_bytes(), both.gathers) +
           gemm_reduce_scatter(work, design).us();
  }
  return gather_gemm_scatter(work, both.gathers, design).us();
}

}  // namespace axonn::times
