// Modelled times of the tiles of a persistent GEMM: when each is multiplied, stored and announced.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/gemm/launch_config.h"
#include "core/schedule/tile_order.h"
#include "model/times_rates.h"
#include "model/times_timeline.h"

namespace axonn::times {

// The times of one tile that waits for nothing.
struct TileTimes {
  double mainloop_us;
  double epilogue_us;
};
TileTimes tile_times(const kernels::LaunchConfig& config, int64_t k, const Rates& rates);

// A grid of tiles in the order in which clusters take them. All ranks run the same grid at the same
// time, up to a rotation, so one rank stands for all: what it sends is what it receives.
struct GemmGrid {
  kernels::LaunchConfig config;
  kernels::TileOrder order;
  bool along_columns = false;
  // With more than one, every batch's first part comes first, then every batch's next part.
  uint32_t turns = 1;
  int64_t m = 0;  // of one batch
  int64_t n = 0;
  int64_t k = 0;
};

// Returns the place of the cluster of tiles at a position in the grid.
kernels::TileOrder::Place place_of(const GemmGrid& grid, uint32_t index);

// One CTA's tile. Tiles beyond the edge, which fill up a cluster, take time and are not listed.
struct TileRecord {
  kernels::TileOrder::Place place;  // of its cluster
  int64_t tile_m;                   // in its batch, in units of tiles
  double begin_us;                  // of the mainloop
  double end_us;                    // of the epilogue, or of the remote write if there is one
  double announced_us;              // when the flag's counter includes it
};

struct Departing {
  int64_t own_batch = -1;        // the batch whose tiles stay on this rank
  bool announce_behind = false;  // a tile is announced before the next tile's epilogue
  Server* port = nullptr;        // the outgoing link of this GPU
  bool all_stay = false;         // no tile departs; all are announced like departing ones
};

struct GemmRun {
  double begin_us;
  double end_us;                  // of the last tile, announced if it departs
  std::vector<TileRecord> tiles;  // in the order in which they end
  std::vector<double> free_us;    // when each CTA has no more tiles
  double flops = 0;               // useful work, without padding
  double departed_bytes = 0;
};

// Runs the grid from `begin_us` on. `arrival` returns when a cluster's operands have arrived.
using Arrival = std::function<double(const kernels::TileOrder::Place&)>;
GemmRun run_gemm(const GemmGrid& grid, double begin_us, const Arrival& arrival,
                 const Departing& departing, const Rates& rates);

}  // namespace axonn::times
