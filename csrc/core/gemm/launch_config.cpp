#include "core/gemm/launch_config.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/gemm/config_rules.h"
#include "core/gemm/sm90_tiles.h"
#include "core/schedule/partition.h"

namespace axonn::kernels {
namespace {

using comm::ceil_div;

constexpr int64_t kLoadBytes = 16;  // row alignment that TMA and 16-byte cp.async require
// A tile's cycles in addition to math and loads: to fill the stages and to drain the accumulators.
// A guess.
constexpr double kTileCycles = 1000;
constexpr double kLaunchUs = 4;  // a guess

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Checks whether the architecture's instructions can multiply the tile.
std::string why_illegal_tile(const LaunchConfig& config, int64_t element_bytes,
                             const DeviceLimits& limits) {
  if (!depth_is_whole_instructions(config, element_bytes, limits)) {
    return text("block_k of ", config.block_k * element_bytes, " bytes must be a multiple of ",
                limits.mma_k_bytes);
  }
  if (!warps_are_whole_groups(config, limits)) {
    return text("num_math_warps=", config.num_math_warps, " must be a multiple of ",
                limits.warps_per_mma * tiles_in_turn(config));
  }
  if (!edges_are_whole_instructions(config, limits)) {
    return text("block_m=", config.block_m, " and block_n=", config.block_n,
                " must be multiples of ", step_m(config, limits), " and ", limits.mma_n);
  }
  if (!fits_one_load(config, limits)) {
    return text("block_m=", config.block_m, " and block_n=", config.block_n, " must be at most ",
                limits.max_box);
  }
  if (!fits_registers(config, limits)) {
    return text("needs ", accumulators_per_thread(config), " accumulators a thread, at most ",
                limits.max_accumulators, " fit");
  }
  return "";
}

// Checks whether a CTA fits on an SM and the grid leaves room for the kernels that it waits for.
std::string why_illegal_launch(const LaunchConfig& config, int64_t element_bytes,
                               const Residency& residency, const DeviceLimits& limits) {
  if (!fits_threads(config, limits)) {
    return text("needs ", threads_per_block(config), " threads, at most ", limits.threads_per_block,
                " fit");
  }
  if (!has_possible_stages(config)) {
    return text("num_stages=", config.num_stages, " must be 2 to ", kMaxStages);
  }
  if (!fits_shared_memory(config, element_bytes, limits)) {
    return text("needs ", shared_bytes(config, element_bytes), " bytes of shared memory, at most ",
                limits.shared_bytes_per_block, " fit");
  }
  const int64_t cluster = ctas_per_cluster(config);
  if (!fits_cluster(config, limits)) {
    return text("clusters of ", cluster, " CTAs, at most ", limits.max_cluster, " are possible");
  }
  const int64_t most = max_ctas(config, residency, limits);
  if (config.num_ctas < 1 || config.num_ctas > most || config.num_ctas % cluster != 0) {
    return text("num_ctas=", config.num_ctas, " must be 1 to ", most, " in clusters of ", cluster,
                ": ", limits.num_sms, " SMs for ", residency.ranks_per_device,
                " ranks, each of which keeps ", residency.producer_ctas,
                " free for producers; a grid without them would spin forever");
  }
  return "";
}

std::string why_illegal_problem(const LaunchConfig& config, const GemmProblem& problem) {
  if (problem.m < 0 || problem.n < 0 || problem.k < 0) {
    return text("sizes must not be negative, got ", problem.m, ", ", problem.n, ", ", problem.k);
  }
  if (problem.batches < 1) return text("rows in ", problem.batches, " batches");
  for (const int64_t size : {problem.n, problem.k}) {
    const int64_t row_bytes = size * problem.element_bytes;
    if (row_bytes % kLoadBytes != 0) {
      return text("rows of ", row_bytes, " bytes (n=", problem.n, ", k=", problem.k,
                  ") must be a multiple of ", kLoadBytes);
    }
  }
  if (problem.chunk_tile_m % config.block_m != 0 || problem.chunk_tile_n % config.block_n != 0) {
    return text("edges of chunks (", problem.chunk_tile_m, ", ", problem.chunk_tile_n,
                ") must be edges of tiles");
  }
  return "";
}

// A GEMM without communication, in waves of num_ctas tiles.
struct Waves {
  int64_t count;
  int64_t num_tiles;
  double first_us;  // of the first wave
  double next_us;   // of each later wave

  // Returns when the first `number` waves are stored.
  double end_us(int64_t number) const {
    return kLaunchUs + (number > 0 ? first_us + static_cast<double>(number - 1) * next_us : 0);
  }
  double end_us() const { return end_us(count); }
};

Waves waves_of(const LaunchConfig& config, const GemmProblem& problem, const DeviceLimits& limits) {
  // A cluster works on adjacent tiles, including tiles beyond the edge, whose results are
  // dropped.
  const auto tiles = [](int64_t size, int64_t block, int64_t cluster) {
    return ceil_div(size, block * cluster) * cluster;
  };
  const int64_t tiles_m =
      tiles(ceil_div(problem.m, problem.batches), config.block_m, config.cluster_m) *
      problem.batches;
  const int64_t tiles_n = tiles(problem.n, config.block_n, config.cluster_n);

  const auto bytes = static_cast<double>(problem.element_bytes);
  const auto block_m = static_cast<double>(config.block_m);
  const auto block_n = static_cast<double>(config.block_n);
  const auto depth = static_cast<double>(ceil_div(problem.k, config.block_k) * config.block_k);
  const double math_cycles = 2 * block_m * block_n * depth * bytes / 2 / limits.flops_per_cycle;
  const double loaded_rows = block_m / static_cast<double>(config.cluster_n) +
                             block_n / static_cast<double>(config.cluster_m);
  const double load_cycles = loaded_rows * depth * bytes / limits.l2_bytes_per_cycle;
  const double store_cycles = block_m * block_n * bytes / limits.l2_bytes_per_cycle;
  const double mainloop_cycles = std::max(math_cycles, load_cycles);
  const double epilogue_cycles = store_cycles + kTileCycles;
  const double tile_cycles = mainloop_cycles + epilogue_cycles;
  const bool overlap = config.schedule == Schedule::kPingpong;
  const double next_cycles = overlap ? std::max(mainloop_cycles, epilogue_cycles) : tile_cycles;
  const double cycles_per_us = limits.clock_ghz * 1e3;
  return {.count = ceil_div(tiles_m * tiles_n, config.num_ctas),
          .num_tiles = tiles_m * tiles_n,
          .first_us = tile_cycles / cycles_per_us,
          .next_us = next_cycles / cycles_per_us};
}

// Returns when a product whose chunks arrive is done: after a chunk has arrived, the product of
// that chunk and of all later ones is still to do.
double arriving_us(const LaunchConfig& config, const GemmProblem& problem,
                   const DeviceLimits& limits) {
  const ArrivingChunks& arriving = problem.arriving;
  double us = 0;
  for (int64_t chunk = arriving.own; chunk < arriving.count; ++chunk) {
    GemmProblem rest = problem;
    int64_t& size = arriving.columns ? rest.n : rest.m;
    size = ceil_div(size * (arriving.count - chunk), arriving.count);
    const double arrived = static_cast<double>(chunk + 1 - arriving.own) * arriving.each_us;
    us = std::max(us, arrived + waves_of(config, rest, limits).end_us());
  }
  return us;
}

// Returns when all departing rows have left. Rows of a wave and of all later ones leave after that
// wave. This bound is linear in the wave, so the first wave or the last one that leaves decides.
double leaving_us(const GemmProblem& problem, const Waves& waves, int64_t num_ctas) {
  const LeavingRows& leaving = problem.leaving;
  const double bytes =
      static_cast<double>(problem.m * problem.n * problem.element_bytes) * leaving.share;
  if (bytes <= 0) return 0;
  const double all_bytes = bytes / leaving.share;
  const double wave_bytes =
      all_bytes * static_cast<double>(num_ctas) / static_cast<double>(waves.num_tiles);
  const auto last = static_cast<int64_t>(std::ceil(bytes / wave_bytes)) - 1;
  double us = 0;
  for (const int64_t wave : {int64_t{0}, last}) {
    const double left = bytes - static_cast<double>(wave) * wave_bytes;
    us = std::max(us, waves.end_us(wave + 1) + left / (leaving.gbps * 1e3));
  }
  return us;
}

}  // namespace

std::string LaunchConfig::describe() const {
  return text("launch config ", block_m, "x", block_n, "x", block_k, ", ", num_stages, " stages, ",
              num_math_warps, "+", num_producer_warps, " warps",
              schedule == Schedule::kPingpong ? " in pingpong" : "", ", cluster ", cluster_m, "x",
              cluster_n, ", ", num_ctas, " CTAs");
}

std::string LaunchConfig::tile() const { return text(block_m, "x", block_n); }

int64_t max_ctas(const LaunchConfig& config, const Residency& residency,
                 const DeviceLimits& limits) {
  const int64_t cluster = ctas_per_cluster(config);
  const int64_t share = limits.num_sms / residency.ranks_per_device - residency.producer_ctas;
  const int64_t left = share - std::min(residency.free_sms, share / 2);
  return std::max<int64_t>(left, 0) / cluster * cluster;
}

std::string why_illegal(const LaunchConfig& config, const GemmProblem& problem,
                        const Residency& residency, const DeviceLimits& limits) {
  std::string why;
  if (!has_positive_sizes(config)) {
    why = "every size must be positive";
  } else if (problem.element_bytes != 2 && problem.element_bytes != 4) {
    why = text("elements must have 2 or 4 bytes, got ", problem.element_bytes);
  } else if (residency.ranks_per_device < 1 || residency.producer_ctas < 0) {
    why = text("a device of ", residency.ranks_per_device, " ranks with ", residency.producer_ctas,
               " producers");
  }
  if (why.empty()) why = why_illegal_tile(config, problem.element_bytes, limits);
  if (why.empty()) {
    why = why_illegal_launch(config, problem.element_bytes, residency, limits);
  }
  if (why.empty()) why = why_illegal_problem(config, problem);
  return why.empty() ? "" : text(config.describe(), " on sm_", limits.architecture, ": ", why);
}

double cost_us(const LaunchConfig& config, const GemmProblem& problem, const DeviceLimits& limits) {
  const Waves waves = waves_of(config, problem, limits);
  return std::max({waves.end_us(), arriving_us(config, problem, limits),
                   leaving_us(problem, waves, config.num_ctas)});
}

std::vector<LaunchConfig> candidates(const DeviceLimits& limits, int64_t element_bytes) {
  std::vector<LaunchConfig> result;
  if (limits.architecture == 90) {
    for (const Sm90Tile& tile : kSm90Tiles) result.push_back(config_of(tile, element_bytes));
  }
  return result;
}

std::vector<ModelledConfig> legal_configs(const GemmProblem& problem, const Residency& residency,
                                          const DeviceLimits& limits) {
  std::vector<ModelledConfig> result;
  if (problem.element_bytes < 1) return result;
  for (LaunchConfig config : candidates(limits, problem.element_bytes)) {
    config.num_ctas = residency.ranks_per_device < 1 ? 0 : max_ctas(config, residency, limits);
    if (!why_illegal(config, problem, residency, limits).empty()) continue;
    result.push_back({config, cost_us(config, problem, limits)});
  }
  return result;
}

std::optional<LaunchConfig> best_config(const GemmProblem& problem, const Residency& residency,
                                        const DeviceLimits& limits) {
  const auto legal = legal_configs(problem, residency, limits);
  const auto best = std::min_element(legal.begin(), legal.end(),
                                     [](const auto& a, const auto& b) { return a.us < b.us; });
  if (best == legal.end()) return std::nullopt;
  return best->config;
}

}  // namespace axonn::kernels
