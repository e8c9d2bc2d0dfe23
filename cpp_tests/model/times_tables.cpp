// Prints the tables of docs/kernel_model.md.
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/fused/fused_gemm.h"
#include "model/times_calls.h"
#include "model/times_choice.h"
#include "model/times_published.h"
#include "model/times_ranking.h"
#include "model/times_rates.h"

namespace axonn::times {
namespace {

void print_rates() {
  std::puts("| what | value | source |\n|---|---|---|");
  for (const Quantity& each : all(kH100)) {
    std::printf("| %s | %g %s | %s%s |\n", each.name, each.value, each.unit,
                each.assumed ? "assumed: " : "", each.source);
  }
}

std::string size_of(const Published& each) {
  const Work& work = each.work;
  if (each.timed == Timed::kGather || each.timed == Timed::kSum) {
    return std::to_string(work.result_bytes() >> 20) + " MiB";
  }
  return std::to_string(work.m) + ", " + std::to_string(work.n) + ", " + std::to_string(work.k);
}

void print_published() {
  std::puts("\n| what | M, N, K of a rank | published, us | modelled, us | error | source |");
  std::puts("|---|---|---|---|---|---|");
  for (const Published& each : published()) {
    std::printf("| %s | %s | %.*f | %.*f | %+.0f %% | %s |\n", name_of(each.timed),
                size_of(each).c_str(), each.us < 100, each.us, each.us < 100, modelled_us(each),
                100 * error_of(each), each.source);
  }
}

// Before and after each letter: its gain over all layers, and the times of one.
void print_steps() {
  constexpr std::size_t kShown = 2 * 5 + 2;  // the layer of 28672 and 8192 features, M = 4096
  std::puts(
      "\n| letter | call | on top of | gain: median | least | most | before, us | after, us |");
  std::puts("|---|---|---|---|---|---|---|---|");
  for (const Step& step : steps()) {
    const Design before = with(step.on_top_of);
    const Design after = with(std::string(1, step.letter), before);
    const std::vector<double> gain = gains(step.call, before, after);
    const auto [least, most] = std::minmax_element(gain.begin(), gain.end());
    std::printf("| (%c) | %s | %s | %.2f | %.2f | %.2f | %.0f | %.0f |\n", step.letter,
                name_of(step.call), step.on_top_of.c_str(), median(gain), *least, *most,
                modelled(step.call, before)[kShown], modelled(step.call, after)[kShown]);
  }
}

void print_speedups() {
  struct Line {
    Call call;
    std::vector<std::string> designs;
  };
  const std::vector<Line> lines = {
      {Call::kGather, {"m", "mo", "mop", "mcp", "mcpg", "mcpgk"}},
      {Call::kScatter, {"m", "ma", "map", "mae", "maeg"}},
      {Call::kSum, {"m", "ma", "mal", "male", "maleg", "malegn", "maj", "maej", "maejp", "malegj"}},
      {Call::kBoth, {"m", "mo", "moa", "moae", "moaeh", "moaehg"}},
      {Call::kHostsGather, {"m", "mp", "mf"}},
      {Call::kHostsScatter, {"m", "mi"}}};
  std::puts("\n| call | design | speed-up over libraries: median | worst |\n|---|---|---|---|");
  for (const Line& line : lines) {
    for (const std::string& letters : line.designs) {
      const Speedup over = speedup(line.call, with(letters));
      std::printf("| %s | %s | %.2f | %.2f |\n", name_of(line.call), letters.c_str(), over.median,
                  over.worst);
    }
  }
}

// What lists of tiles come to, each as if its fastest tile were known; first, what is chosen now.
void print_tiles() {
  using kernels::LaunchConfig;
  constexpr auto kCooperative = kernels::Schedule::kCooperative;
  constexpr auto kPingpong = kernels::Schedule::kPingpong;
  const LaunchConfig large = tile_of(128, 256, 2, 1, kCooperative);
  const LaunchConfig smaller = tile_of(128, 128, 1, 2, kPingpong);
  const LaunchConfig flat = tile_of(64, 256, 2, 1, kPingpong);
  const LaunchConfig least = tile_of(64, 128, 2, 1, kPingpong);
  std::vector<LaunchConfig> all, of_128_rows;
  for (const LaunchConfig& tile : library_tiles()) {
    if (kernels::cuda::kChunkRows % (tile.block_m * tile.cluster_m) != 0) continue;
    if (kernels::cuda::kChunkRows % (tile.block_n * tile.cluster_n) != 0) continue;
    all.push_back(tile);
    if (tile.block_m == large.block_m) of_128_rows.push_back(tile);
  }
  struct Line {
    std::string name;
    std::vector<LaunchConfig> tiles;
  };
  const std::vector<Line> lines = {
      {"those built, as chosen", {}},
      {"those built: L, 128 x 128 pingpong (1 x 2), 64 x 128 pingpong (2 x 1)",
       {large, smaller, least}},
      {"L, 128 x 128 pingpong (1 x 2)", {large, smaller}},
      {"before (g): L, 128 x 128 cooperative (2 x 1)",
       {large, tile_of(128, 128, 2, 1, kCooperative)}},
      {"L, 128 x 128 cooperative (1 x 2)", {large, tile_of(128, 128, 1, 2, kCooperative)}},
      {"all " + std::to_string(of_128_rows.size()) + " kinds of 128 rows", of_128_rows},
      {"L, 64 x 256 pingpong (2 x 1)", {large, flat}},
      {"L, 64 x 256 pingpong (2 x 1), 64 x 128 pingpong (2 x 1)", {large, flat, least}},
      {"all " + std::to_string(all.size()) + " kinds", all}};
  std::puts(
      "\n| tiles | all-gather, `mop` | reduce-scatter, `map` | all-reduce, `map` |"
      " all-reduce, `maejp` |\n|---|---|---|---|---|");
  for (const Line& line : lines) {
    std::printf("| %s |", line.name.c_str());
    for (const auto& [call, letters] : {std::pair{Call::kGather, "mop"},
                                        {Call::kScatter, "map"},
                                        {Call::kSum, "map"},
                                        {Call::kSum, "maejp"}}) {
      Design design = with(letters);
      design.tiles = line.tiles;
      const Speedup over = speedup(call, design);
      std::printf(" %.2f, %.2f |", over.median, over.worst);
    }
    std::puts("");
  }
}

// What the host costs a call that finds it idle, without and with (b).
void print_idle() {
  std::puts("\n| M | now, host ahead, us | now, host idle, us | (b), host idle, us | host, us |");
  std::puts("|---|---|---|---|---|");
  for (const int64_t m : kRows) {
    const Work work{m, 28672 / 8, 8192};
    const CallTimes now = all_gather_gemm(work, with("mcp"), Host::kIdle);
    std::printf("| %lld | %.0f | %.0f | %.0f | %.0f |\n", static_cast<long long>(m),
                all_gather_gemm(work, with("mcp")).us(), now.us(),
                all_gather_gemm(work, with("mbcp"), Host::kIdle).us(), now.host_us);
  }
}

}  // namespace
}  // namespace axonn::times

int main() {
  axonn::times::print_rates();
  axonn::times::print_published();
  axonn::times::print_steps();
  axonn::times::print_speedups();
  axonn::times::print_tiles();
  axonn::times::print_idle();
  return 0;
}
