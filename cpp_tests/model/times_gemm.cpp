#include "model/times_gemm.h"

#include <algorithm>
#include <cstddef>
#include <queue>
#include <tuple>
#include <utility>

#include "core/schedule/partition.h"

namespace axonn::times {
namespace {

using comm::ceil_div;
using kernels::LaunchConfig;
using kernels::TileOrder;

constexpr double kElementBytes = 2;
constexpr int64_t kWgmmaRows = 64;

double d(int64_t value) { return static_cast<double>(value); }

double cycles_to_us(double cycles, const Rates& rates) { return cycles / rates.clock_ghz / 1e3; }

// A cluster at work. Clusters are the unit of the order; the CTAs of one run in step.
struct Worker {
  uint32_t next;                         // index in the order
  double end = 0;                        // of the last tile
  double left = 0;                       // when the last tile has reached its destination
  std::vector<std::size_t> unannounced;  // records of the last tile
  bool started = false;
};

// What happens next to a worker: it can begin a tile, or it has multiplied one.
struct Event {
  double at;
  uint64_t number;  // breaks ties: simultaneous events happen in the order of their creation
  std::size_t worker;
  bool multiplied;
  friend bool operator>(const Event& a, const Event& b) {
    return std::tie(a.at, a.number) > std::tie(b.at, b.number);
  }
};

class Simulation {
 public:
  Simulation(const GemmGrid& grid, double begin_us, const Arrival& arrival,
             const Departing& departing, const Rates& rates)
      : grid_(grid),
        arrival_(arrival),
        departing_(departing),
        rates_(rates),
        times_(tile_times(grid.config, grid.k, rates)) {
    const LaunchConfig& config = grid.config;
    const int64_t ctas = config.cluster_m * config.cluster_n;
    const auto most = static_cast<uint32_t>(config.num_ctas / ctas);
    const uint32_t count = std::min(most, grid.order.num_tiles());
    run_.begin_us = begin_us;
    run_.free_us.assign(static_cast<std::size_t>(config.num_ctas), begin_us);
    for (uint32_t worker = 0; worker < count; ++worker) {
      workers_.push_back({worker, begin_us, begin_us, {}, false});
      push(begin_us, worker, false);
    }
  }

  GemmRun run() {
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      if (event.multiplied) {
        store(event.worker, event.at);
      } else {
        begin(event.worker, event.at);
      }
    }
    run_.end_us = run_.begin_us;
    const LaunchConfig& config = grid_.config;
    const auto ctas = static_cast<std::size_t>(config.cluster_m * config.cluster_n);
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      const double end = finish(workers_[i]);
      run_.end_us = std::max(run_.end_us, end);
      std::fill_n(run_.free_us.begin() + static_cast<std::ptrdiff_t>(i * ctas), ctas, end);
    }
    return std::move(run_);
  }

 private:
  void push(double at, std::size_t worker, bool multiplied) {
    events_.push({at, number_++, worker, multiplied});
  }

  void begin(std::size_t index, double at) {
    Worker& worker = workers_[index];
    if (worker.next >= grid_.order.num_tiles()) return;
    const double arrived = arrival_ ? arrival_(place_of(grid_, worker.next)) : at;
    double begins = std::max(at, arrived);
    // The producer warp runs ahead of the math, unless it had to wait.
    if (!worker.started || arrived > at) begins += rates_.load_us;
    worker.started = true;
    push(begins + times_.mainloop_us, index, true);
  }

  void store(std::size_t index, double multiplied) {
    Worker& worker = workers_[index];
    const TileOrder::Place place = place_of(grid_, worker.next);
    double ready = std::max(multiplied, worker.end);  // epilogues take turns, too
    if (departing_.announce_behind && !worker.unannounced.empty()) {
      const double arrived = std::max(ready, worker.left);
      announce(worker, arrived);
      ready = arrived + rates_.announce_us;
    }
    const double stored = ready + times_.epilogue_us;
    worker.left = record_tiles(worker, place, multiplied - times_.mainloop_us, stored);
    const bool pingpong = grid_.config.schedule == kernels::Schedule::kPingpong;
    // With pingpong, a warpgroup announces its tile while the other one multiplies.
    const bool waits = departing_.port != nullptr && (pingpong || !departing_.announce_behind);
    if (waits || departing_.port == nullptr) announce(worker, worker.left);
    const double end = waits ? worker.left + rates_.announce_us : stored;
    const double end_before = std::exchange(worker.end, end);
    worker.next += static_cast<uint32_t>(workers_.size());
    push(pingpong ? std::max(multiplied, end_before) : end, index, false);
  }

  // Lists a cluster's tiles and sends them to their destination. Returns when they arrive there.
  double record_tiles(Worker& worker, const TileOrder::Place& place, double begun, double stored) {
    const LaunchConfig& config = grid_.config;
    const auto row = static_cast<int64_t>(grid_.along_columns ? place.across : place.along);
    const auto column = static_cast<int64_t>(grid_.along_columns ? place.along : place.across);
    const bool departs = departing_.port != nullptr && !departing_.all_stay &&
                         static_cast<int64_t>(place.batch) != departing_.own_batch;
    double left = stored;
    for (int64_t cta = 0; cta < config.cluster_m * config.cluster_n; ++cta) {
      const int64_t tile_m = row * config.cluster_m + cta % config.cluster_m;
      const int64_t tile_n = column * config.cluster_n + cta / config.cluster_m;
      const int64_t rows = std::min(config.block_m, grid_.m - tile_m * config.block_m);
      const int64_t columns = std::min(config.block_n, grid_.n - tile_n * config.block_n);
      if (rows <= 0 || columns <= 0) continue;
      double end = stored;
      if (departs) {
        const double bytes = d(rows * columns) * kElementBytes;
        run_.departed_bytes += bytes;
        const Interval sent = departing_.port->serve(stored, us_of(bytes, rates_.store_gbps));
        end = sent.end + rates_.peer_us;
        left = std::max(left, end);
      }
      run_.flops += 2 * d(rows * columns * grid_.k);
      worker.unannounced.push_back(run_.tiles.size());
      run_.tiles.push_back({place, tile_m, begun, end, 0});
    }
    return left;
  }

  void announce(Worker& worker, double at) {
    for (const std::size_t tile : worker.unannounced) {
      run_.tiles[tile].announced_us = std::max(at, run_.tiles[tile].end_us) + rates_.announce_us;
    }
    worker.unannounced.clear();
  }

  // Returns when a worker has announced its last tile, and so ends.
  double finish(Worker& worker) {
    double end = worker.end;
    for (const std::size_t tile : worker.unannounced) {
      end = std::max(end, run_.tiles[tile].end_us + rates_.announce_us);
    }
    announce(worker, worker.end);
    return end;
  }

  const GemmGrid& grid_;
  const Arrival& arrival_;
  const Departing& departing_;
  const Rates& rates_;
  TileTimes times_;
  std::vector<Worker> workers_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t number_ = 0;
  GemmRun run_{};
};

}  // namespace

TileOrder::Place place_of(const GemmGrid& grid, uint32_t index) {
  TileOrder part = grid.order;
  part.along /= grid.turns;
  const uint32_t turn = index / part.num_tiles();
  TileOrder::Place place = part.place(index - turn * part.num_tiles());
  place.along += turn * part.along;
  return place;
}

TileTimes tile_times(const LaunchConfig& config, int64_t k, const Rates& rates) {
  const double row_bytes = d(config.block_k) * kElementBytes;
  const double tensor =
      2 * d(config.block_m * config.block_n * config.block_k) / rates.flops_per_cycle;
  // wgmma reads A once, and all of B again for every 64 rows.
  const double read =
      d(config.block_m + ceil_div(config.block_m, kWgmmaRows) * config.block_n) * row_bytes;
  const double shared = read / rates.shared_bytes_per_cycle;
  const double loaded =
      (d(config.block_m) / d(config.cluster_n) + d(config.block_n) / d(config.cluster_m)) *
      row_bytes;
  const double l2 = loaded / rates.l2_bytes_per_cycle;
  const double stored = d(config.block_m * config.block_n) * kElementBytes;
  return {cycles_to_us(std::max({tensor, shared, l2}) * d(ceil_div(k, config.block_k)), rates),
          cycles_to_us(stored / rates.shared_bytes_per_cycle, rates) + rates.epilogue_us};
}

GemmRun run_gemm(const GemmGrid& grid, double begin_us, const Arrival& arrival,
                 const Departing& departing, const Rates& rates) {
  return Simulation(grid, begin_us, arrival, departing, rates).run();
}

}  // namespace axonn::times
