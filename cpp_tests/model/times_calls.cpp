#include "model/times_calls.h"

#include <algorithm>
#include <cstddef>
#include <map>

#include "core/cuda/fused/switch_sum.h"
#include "core/schedule/chunk_plan.h"
#include "model/times_choice.h"

namespace axonn::times {
namespace {

using comm::ChunkIndex;
using comm::ChunkPlan;
using kernels::LaunchConfig;
using kernels::TileOrder;

// (n): SMs that no GEMM takes, for the sums. Assumed; arXiv:2511.13940 fills the link from 15 SMs.
constexpr int64_t kSumSms = 16;

// begin_call: a one-warp kernel waits until the peers have ended the previous call, which they do
// at the same time as this rank.
void begin_call(Node& node) { node.kernel(node.rates().peer_us + node.rates().seen_us); }
void end_call(Node& node) { node.kernel(0); }

// Returns, by ordinal, when a waiting warp sees each chunk.
std::vector<double> push_chunks(Node& node, const ChunkPlan& plan, int64_t row_bytes,
                                double ready_us, const Design& design) {
  const Raise raise = design.write_values   ? Raise::kWrittenValue
                      : design.device_flags ? Raise::kDeviceWord
                                            : Raise::kHostWord;
  std::vector<double> seen(static_cast<std::size_t>(plan.num_chunks()), 0);
  for (int64_t step = plan.chunks_per_shard; step < plan.num_chunks(); ++step) {
    // This rank's push at a step is, on the peer, the arrival of the chunk visited at that step.
    const ChunkIndex index = plan.gather_visit(0, step);
    const auto queue = static_cast<std::size_t>(step / plan.chunks_per_shard);
    seen[static_cast<std::size_t>(plan.ordinal(index))] =
        node.push(queue, ready_us, plan.chunk(index).size() * row_bytes, raise) +
        node.rates().seen_us;
  }
  return seen;
}

// Returns a function that tells when the operands of a cluster of tiles have arrived.
Arrival arrival_of(const ChunkPlan& plan, const GemmGrid& grid, const std::vector<double>& seen) {
  const int64_t rows = grid.config.block_m * grid.config.cluster_m;
  return [&plan, &seen, rows, batch_rows = grid.m](const TileOrder::Place& place) {
    const int64_t begin = static_cast<int64_t>(place.batch) * batch_rows +
                          std::min(static_cast<int64_t>(place.along) * rows, batch_rows - 1);
    const auto span = plan.needed({begin, std::min(begin + rows, plan.count)});
    double latest = 0;
    for (int64_t chunk = span.first; chunk <= span.last; ++chunk) {
      latest = std::max(latest, seen[static_cast<std::size_t>(chunk)]);
    }
    return latest;
  };
}

// Returns, for each chunk of this rank's rows, when all sources' addends are announced here. A
// source sends them at the step at which this rank sends to the destination at the same distance.
std::vector<double> addends(const GemmRun& run, const GemmGrid& grid, int64_t chunks,
                            const Rates& rates) {
  const ChunkPlan rows{grid.m, 1, chunks, kernels::cuda::kPartRows};
  std::vector<double> arrived(static_cast<std::size_t>(chunks), run.begin_us);
  for (const TileRecord& tile : run.tiles) {
    const auto chunk = rows.at(tile.tile_m * grid.config.block_m).chunk;
    double& latest = arrived[static_cast<std::size_t>(chunk)];
    latest = std::max(latest, tile.announced_us + rates.peer_us);
  }
  return arrived;
}

template <class Call>
CallTimes fastest(const std::vector<LaunchConfig>& tiles, Call&& call) {
  CallTimes best;
  for (const LaunchConfig& tile : tiles) {
    const CallTimes times = call(tile);
    if (best.device_us == 0 || times.device_us < best.device_us) best = times;
  }
  return best;
}

struct Scatter {
  GemmGrid grid;
  GemmRun run;
  std::vector<double> arrived;  // when each chunk's addends are announced
};

Scatter run_scatter(Node& node, const Work& work, const Design& design, LaunchConfig tile,
                    const Arrival& arrival = {}) {
  const int64_t chunks = gemm_of(work, Flow::kDeparts).departures.chunks_per_shard;
  if (design.in_turns) tile.num_ctas -= kSumSms;
  Scatter result{grid_of(work, Flow::kDeparts, tile), {}, {}};
  if (design.in_turns && result.grid.order.along % chunks == 0) {
    result.grid.turns = static_cast<uint32_t>(chunks);
  }
  begin_call(node);
  const double begin = node.kernel_begin(node.enqueue(node.rates().host_launch_us));
  const Departing departing{0, design.announce_behind, &node.out()};
  result.run = run_gemm(result.grid, begin, arrival, departing, node.rates());
  node.until(result.run.end_us);
  result.arrived = addends(result.run, result.grid, chunks, node.rates());
  if (design.in_turns) result.run.free_us.insert(result.run.free_us.end(), kSumSms, begin);
  return result;
}

// Waits for all addends, then adds them up; with (e) or (n), chunk by chunk as they arrive.
void sum_chunks(Node& node, const Scatter& scatter, const Design& design, double sum_us) {
  const Rates& rates = node.rates();
  if (design.sums_early || design.in_turns) {
    const double chunk_us = sum_us / static_cast<double>(scatter.arrived.size());
    node.until(sums_end_us(scatter.arrived, scatter.run.free_us, chunk_us, rates));
    return;
  }
  node.kernel(0);
  for (const double arrived : scatter.arrived) node.until(arrived + rates.seen_us);
  node.kernel(sum_us);
}

// (j): the switch's reads and its stores share each direction of the links: a rank receives the
// rows of all ranks, and the sums of its own share.
double multimem_us(const Work& work, double bytes) {
  return us_of(bytes * (work.ranks + 1) / work.ranks, kH100.multicast_gbps);
}

double sum_traffic_us(const Work& work, const Rates& rates) {
  const auto slot = static_cast<double>(work.result_bytes() / work.ranks);
  return us_of(slot * (work.ranks + 1), rates.hbm_gbps);
}

CallTimes times_of(const Node& node, const GemmRun& run, const LaunchConfig& tile) {
  return {.device_us = node.now(),
          .host_us = node.host_us(),
          .gemm_us = run.end_us - run.begin_us,
          .flops = run.flops,
          .sent_bytes = run.departed_bytes + static_cast<double>(node.pushed_bytes()),
          .config = tile};
}

CallTimes reduce_scatter(const Work& work, const Design& design, const LaunchConfig& tile,
                         Host host) {
  Node node(kH100, host);
  const Scatter scatter = run_scatter(node, work, design, tile);
  sum_chunks(node, scatter, design, sum_traffic_us(work, kH100));
  end_call(node);
  return times_of(node, scatter.run, tile);
}

// (j) without (e): the switch adds up after the GEMM.
CallTimes multimem_behind(const Work& work, const Design& design, const LaunchConfig& tile,
                          Host host) {
  Node node(kH100, host);
  begin_call(node);
  const double begin = node.kernel_begin(node.enqueue(kH100.host_launch_us));
  const GemmRun run = run_gemm(grid_of(work, Flow::kStays, tile), begin, {}, {}, kH100);
  node.until(run.end_us);
  node.kernel(kH100.peer_us);                  // tells the peers that the product is ready
  node.kernel(kH100.peer_us + kH100.seen_us);  // waits for the peers' products
  node.kernel(multimem_us(work, static_cast<double>(work.result_bytes())));
  node.kernel(kH100.peer_us);  // the same for the sums
  node.kernel(kH100.peer_us + kH100.seen_us);
  if (!design.result_in_place) node.copy(work.result_bytes());
  end_call(node);
  CallTimes times = times_of(node, run, tile);
  times.sent_bytes = static_cast<double>(work.result_bytes());
  return times;
}

// Returns when each part of the product is announced to all ranks.
std::vector<double> parts_announced(const Work& work, const GemmGrid& grid, const GemmRun& run) {
  const auto parts = kernels::cuda::SwitchParts::of(work.m);
  const ChunkPlan plan{work.m, parts.batches, parts.chunks_per_batch, kernels::cuda::kPartRows};
  std::vector<double> announced(static_cast<std::size_t>(parts.count()), run.begin_us);
  for (const TileRecord& tile : run.tiles) {
    const int64_t row =
        static_cast<int64_t>(tile.place.batch) * grid.m + tile.tile_m * grid.config.block_m;
    double& latest = announced[static_cast<std::size_t>(plan.ordinal(plan.at(row)))];
    latest = std::max(latest, tile.announced_us + kH100.seen_us + kH100.peer_us);
  }
  return announced;
}

// (j) with (e): a kernel on separate SMs adds up part by part, and copies the sums out.
CallTimes multimem_beside(const Work& work, const Design& design, LaunchConfig tile, Host host) {
  Node node(kH100, host);
  begin_call(node);
  node.enqueue(2 * kH100.host_call_us);
  const auto sum_ctas = static_cast<double>(kernels::cuda::switch_sum_ctas(tile.num_ctas));
  tile = kernels::cuda::beside_switch_sum(tile);
  const GemmGrid grid = grid_of(work, Flow::kInParts, tile);
  const double begin = node.kernel_begin(node.enqueue(kH100.host_launch_us));
  const Departing announced_here{-1, design.announce_behind, &node.out(), true};
  const GemmRun run = run_gemm(grid, begin, {}, announced_here, kH100);
  const double copy_share = std::min(1.0, sum_ctas / static_cast<double>(kH100.sms_for_hbm));
  Server link, copies;
  const auto parts = kernels::cuda::SwitchParts::of(work.m);
  int64_t row = 0;
  node.enqueue(kH100.host_launch_us);
  const std::vector<double> announced = parts_announced(work, grid, run);
  for (int32_t part = 0; part < parts.count(); ++part) {
    const int64_t end = parts.row_end(work.m, part);
    const auto bytes = static_cast<double>((end - row) * work.n * kElementBytes);
    row = end;
    const double ready = announced[static_cast<std::size_t>(part)] + kH100.seen_us;
    const double added = link.serve(ready, multimem_us(work, bytes)).end + kH100.announce_us +
                         kH100.peer_us + kH100.seen_us;
    if (!design.result_in_place) {
      copies.serve(added, us_of(2 * bytes, kH100.hbm_gbps) / copy_share);
    }
    node.until(std::max(added, copies.free_us()));
  }
  node.until(run.end_us);
  node.until(node.now() + kH100.event_us);  // event of the stream that adds up
  node.enqueue(2 * kH100.host_call_us);
  end_call(node);
  CallTimes times = times_of(node, run, tile);
  times.sent_bytes = static_cast<double>(work.result_bytes());
  return times;
}

CallTimes all_reduce(const Work& work, const Design& design, const LaunchConfig& tile, Host host) {
  if (design.multimem) {
    return design.sums_early ? multimem_beside(work, design, tile, host)
                             : multimem_behind(work, design, tile, host);
  }
  Node node(kH100, host);
  const Scatter scatter = run_scatter(node, work, design, tile);
  // Each rank's rows reach every rank, including itself, through one multicast.
  const auto received = static_cast<double>(work.result_bytes());
  const double sum_us =
      std::max(sum_traffic_us(work, kH100), us_of(received, kH100.multicast_gbps));
  sum_chunks(node, scatter, design, sum_us);
  // The stores of all ranks' tiles and sums share one link into this GPU.
  node.until(scatter.run.begin_us + us_of(scatter.run.departed_bytes, kH100.store_gbps) +
             us_of(received, kH100.multicast_gbps));
  node.kernel(kH100.peer_us);                  // raises the flags of the sums
  node.kernel(kH100.peer_us + kH100.seen_us);  // waits for the peers' flags
  if (!design.result_in_place) node.copy(work.result_bytes());
  end_call(node);
  CallTimes times = times_of(node, scatter.run, tile);
  times.sent_bytes += received;
  return times;
}

}  // namespace

double sums_end_us(const std::vector<double>& arrived_us, std::vector<double> free_us,
                   double chunk_us, const Rates& rates) {
  std::sort(free_us.begin(), free_us.end());
  std::size_t num_free = 0;
  double now = free_us.empty() ? 0 : free_us.front();
  for (const double arrived : arrived_us) {
    now = std::max(now, arrived + rates.seen_us);
    double left = chunk_us;
    while (left > 0) {
      while (num_free < free_us.size() && free_us[num_free] <= now) ++num_free;
      const double rate = std::min(1.0, static_cast<double>(num_free) / rates.sms_for_hbm);
      const bool more = num_free < free_us.size();
      const double until = more ? free_us[num_free] : now + left / rate;
      const double done = std::min(left, (until - now) * rate);
      now = done < left ? until : now + done / rate;
      left -= done;
      if (left < 1e-9) break;
    }
  }
  return now;
}

CallTimes all_gather_gemm(const Work& work, const Design& design, const LaunchConfig& tile,
                          Host host) {
  Node node(kH100, host, design.two_queues ? 2 : 1);
  const GemmGrid grid = grid_of(work, Flow::kArrives, tile);
  const ChunkPlan plan = gemm_of(work, Flow::kArrives).arrivals.plan;
  begin_call(node);
  const double ready = node.now() + kH100.event_us;
  node.enqueue(2 * kH100.host_call_us);
  std::vector<double> seen;
  double enqueued = 0;
  const auto push = [&] { seen = push_chunks(node, plan, work.k * kElementBytes, ready, design); };
  if (!design.gemm_first) push();
  if (!design.own_in_place) node.copy(plan.shard(0).size() * work.k * kElementBytes);
  enqueued = node.enqueue(kH100.host_launch_us);
  if (design.gemm_first) push();
  const double begin = node.kernel_begin(enqueued);
  const GemmRun run = run_gemm(grid, begin, arrival_of(plan, grid, seen), {}, kH100);
  node.until(run.end_us);
  node.enqueue(2 * kH100.host_call_us);
  node.until(node.engines_free_us() + kH100.event_us);
  end_call(node);
  return times_of(node, run, tile);
}

CallTimes gather_gemm_scatter(const Work& work, int32_t gathers, const Design& design) {
  return fastest(choices(work, design, Flow::kDeparts), [&](const LaunchConfig& tile) {
    Node node(kH100, Host::kAhead);
    const ChunkPlan plan{work.m, gathers, kernels::cuda::chunks_per_shard(work.m / gathers)};
    const double ready = node.kernel_begin(0) + kH100.peer_us + kH100.seen_us + kH100.event_us;
    const auto seen = push_chunks(node, plan, work.k * kElementBytes, ready, design);
    if (!design.own_in_place) node.copy(plan.shard(0).size() * work.k * kElementBytes);
    const GemmGrid grid = grid_of(work, Flow::kDeparts, tile);
    const Scatter scatter = run_scatter(node, work, design, tile, arrival_of(plan, grid, seen));
    sum_chunks(node, scatter, design, sum_traffic_us(work, kH100));
    end_call(node);
    return times_of(node, scatter.run, tile);
  });
}

CallTimes all_gather_gemm(const Work& work, const Design& design, Host host) {
  return fastest(choices(work, design, Flow::kArrives), [&](const LaunchConfig& tile) {
    return all_gather_gemm(work, design, tile, host);
  });
}

CallTimes gemm_reduce_scatter(const Work& work, const Design& design, Host host) {
  return fastest(choices(work, design, Flow::kDeparts), [&](const LaunchConfig& tile) {
    return reduce_scatter(work, design, tile, host);
  });
}

CallTimes gemm_all_reduce(const Work& work, const Design& design, Host host) {
  const Flow flow = !design.multimem    ? Flow::kDeparts
                    : design.sums_early ? Flow::kInParts
                                        : Flow::kStays;  // until the switch adds it up
  return fastest(choices(work, design, flow),
                 [&](const LaunchConfig& tile) { return all_reduce(work, design, tile, host); });
}

}  // namespace axonn::times
