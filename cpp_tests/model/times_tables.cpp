#include "model/times_tables.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/fused/fused_gemm.h"
#include "core/gemm/sm90_tiles.h"
#include "model/times_calls.h"
#include "model/times_choice.h"
#include "model/times_published.h"
#include "model/times_ranking.h"
#include "model/times_rates.h"

namespace axonn::times {
namespace {

// Appends to a text as std::printf prints.
__attribute__((format(printf, 2, 3))) void add(std::string& text, const char* format, ...) {
  char line[1024];
  va_list values;
  va_start(values, format);
  const int length = std::vsnprintf(line, sizeof(line), format, values);
  va_end(values);
  if (length < 0 || length >= static_cast<int>(sizeof(line))) {
    throw std::length_error("a line of a table is too long");
  }
  text += line;
}

std::string rates() {
  std::string text = "| what | value | source |\n|---|---|---|\n";
  for (const Quantity& each : all(kH100)) {
    add(text, "| %s | %g %s | %s%s |\n", each.name, each.value, each.unit,
        each.assumed ? "assumed: " : "", each.source);
  }
  return text;
}

std::string size_of(const Published& each) {
  const Work& work = each.work;
  if (each.timed == Timed::kGather || each.timed == Timed::kSum) {
    return std::to_string(work.result_bytes() >> 20) + " MiB";
  }
  return std::to_string(work.m) + ", " + std::to_string(work.n) + ", " + std::to_string(work.k);
}

std::string published_times() {
  std::string text =
      "| what | M, N, K of a rank | published, us | modelled, us | error | source |\n"
      "|---|---|---|---|---|---|\n";
  for (const Published& each : published()) {
    add(text, "| %s | %s | %.*f | %.*f | %+.0f %% | %s |\n", name_of(each.timed),
        size_of(each).c_str(), each.us < 100, each.us, each.us < 100, modelled_us(each),
        100 * error_of(each), each.source);
  }
  return text;
}

// Before and after each letter: its gain over all layers, and the times of one.
std::string gains_of_letters() {
  constexpr std::size_t kShown = 2 * 5 + 2;  // the layer of 28672 and 8192 features, M = 4096
  std::string text =
      "| letter | call | on top of | gain: median | least | most | before, us | after, us |\n"
      "|---|---|---|---|---|---|---|---|\n";
  for (const Step& step : steps()) {
    const Design before = with(step.on_top_of);
    const Design after = with(std::string(1, step.letter), before);
    const std::vector<double> gain = gains(step.call, before, after);
    const auto [least, most] = std::minmax_element(gain.begin(), gain.end());
    add(text, "| (%c) | %s | %s | %.2f | %.2f | %.2f | %.0f | %.0f |\n", step.letter,
        name_of(step.call), step.on_top_of.c_str(), median(gain), *least, *most,
        modelled(step.call, before)[kShown], modelled(step.call, after)[kShown]);
  }
  return text;
}

std::string speedups_of_designs() {
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
  std::string text =
      "| call | design | speed-up over libraries: median | worst |\n|---|---|---|---|\n";
  for (const Line& line : lines) {
    for (const std::string& letters : line.designs) {
      const Speedup over = speedup(line.call, with(letters));
      add(text, "| %s | %s | %.2f | %.2f |\n", name_of(line.call), letters.c_str(), over.median,
          over.worst);
    }
  }
  return text;
}

std::string names_of(const std::vector<kernels::LaunchConfig>& tiles) {
  std::string text;
  for (const kernels::LaunchConfig& tile : tiles) {
    const bool in_turn = tile.schedule == kernels::Schedule::kPingpong;
    add(text, "%s%lld x %lld %s (%lld x %lld)", text.empty() ? "" : ", ",
        static_cast<long long>(tile.block_m), static_cast<long long>(tile.block_n),
        in_turn ? "pingpong" : "cooperative", static_cast<long long>(tile.cluster_m),
        static_cast<long long>(tile.cluster_n));
  }
  return text;
}

// What lists of tiles come to, each as if its fastest tile were known; first, what is chosen now.
std::string lists_of_tiles() {
  using kernels::LaunchConfig;
  constexpr auto kCooperative = kernels::Schedule::kCooperative;
  constexpr auto kPingpong = kernels::Schedule::kPingpong;
  const LaunchConfig large = tile_of(128, 256, 2, 1, kCooperative);
  const LaunchConfig smaller = tile_of(128, 128, 1, 2, kPingpong);
  const LaunchConfig flat = tile_of(64, 256, 2, 1, kPingpong);
  const LaunchConfig least = tile_of(64, 128, 2, 1, kPingpong);
  std::vector<LaunchConfig> built, all, of_128_rows;
  for (const kernels::Sm90Tile& tile : kernels::kSm90Tiles) {
    built.push_back(
        tile_of(tile.block_m, tile.block_n, tile.cluster_m, tile.cluster_n, tile.schedule));
  }
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
      {"those built: " + names_of(built), built},
      {"L, 128 x 128 pingpong (1 x 2)", {large, smaller}},
      {"before (g): L, 128 x 128 cooperative (2 x 1)",
       {large, tile_of(128, 128, 2, 1, kCooperative)}},
      {"L, 128 x 128 cooperative (1 x 2)", {large, tile_of(128, 128, 1, 2, kCooperative)}},
      {"all " + std::to_string(of_128_rows.size()) + " kinds of 128 rows", of_128_rows},
      {"L, 64 x 256 pingpong (2 x 1)", {large, flat}},
      {"L, 64 x 256 pingpong (2 x 1), 64 x 128 pingpong (2 x 1)", {large, flat, least}},
      {"all " + std::to_string(all.size()) + " kinds", all}};
  std::string text =
      "| tiles | all-gather, `mop` | reduce-scatter, `map` | all-reduce, `map` |"
      " all-reduce, `maejp` |\n|---|---|---|---|---|\n";
  for (const Line& line : lines) {
    add(text, "| %s |", line.name.c_str());
    for (const auto& [call, letters] : {std::pair{Call::kGather, "mop"},
                                        {Call::kScatter, "map"},
                                        {Call::kSum, "map"},
                                        {Call::kSum, "maejp"}}) {
      Design design = with(letters);
      design.tiles = line.tiles;
      const Speedup over = speedup(call, design);
      add(text, " %.2f, %.2f |", over.median, over.worst);
    }
    text += '\n';
  }
  return text;
}

// What the host costs a call that finds it idle, without and with (b).
std::string idle_host() {
  std::string text =
      "| M | now, host ahead, us | now, host idle, us | (b), host idle, us | host, us |\n"
      "|---|---|---|---|---|\n";
  for (const int64_t m : kRows) {
    const Work work{m, 28672 / 8, 8192};
    const CallTimes now = all_gather_gemm(work, with("mcp"), Host::kIdle);
    add(text, "| %lld | %.0f | %.0f | %.0f | %.0f |\n", static_cast<long long>(m),
        all_gather_gemm(work, with("mcp")).us(), now.us(),
        all_gather_gemm(work, with("mbcp"), Host::kIdle).us(), now.host_us);
  }
  return text;
}

}  // namespace

std::string with_tables(std::string page, bool slow_ones) {
  struct Table {
    const char* name;
    std::string (*text)();
    bool is_slow = false;
  };
  for (const Table& table :
       {Table{"rates", rates}, Table{"published", published_times},
        Table{"letters", gains_of_letters}, Table{"designs", speedups_of_designs, true},
        Table{"tiles", lists_of_tiles, true}, Table{"idle host", idle_host}}) {
    const std::string begin = std::string("<!-- ") + table.name + ": begin -->\n";
    const std::size_t from = page.find(begin);
    const std::size_t to = page.find(std::string("<!-- ") + table.name + ": end -->", from);
    if (from == std::string::npos || to == std::string::npos) {
      throw std::invalid_argument(std::string("expected the marks of the table ") + table.name);
    }
    if (table.is_slow && !slow_ones) continue;
    page.replace(from + begin.size(), to - from - begin.size(), "\n" + table.text() + "\n");
  }
  return page;
}

}  // namespace axonn::times
