// Optional changes that make the fused calls faster, one switch each; the model estimates their
// gain. Their letters are those of docs/kernel_model.md.
#pragma once

#include <string>
#include <vector>

#include "core/gemm/launch_config.h"

namespace axonn::times {

struct Design {
  bool announce_behind = false;  // (a) a tile is announced before the next tile's stores
  bool gemm_first = false;       // (b) the host enqueues the GEMM before the copies
  bool write_values = false;     // (c) the copy queue writes flags itself, by cuStreamWriteValue32
  bool own_in_place = false;     // (d) this rank's shard is read in place, not copied first
  bool sums_early = false;       // (e) sums start as chunks arrive, on SMs that have no more tiles
  bool grouped = false;          // (f) one ncclGroup for all chunks of a shard
  bool more_tiles = false;       // (g) 64-row and pingpong tiles; the model chooses among all
  bool both = false;             // (h) one kernel gathers and scatters
  bool over_hosts = false;       // (i) reduce-scatter across hosts is fused
  bool multimem = false;         // (j) an all-reduce by multimem.ld_reduce
  bool two_queues = false;       // (k) two copy engines push to two peers at a time
  bool result_in_place = false;  // (l) an all-reduce's result stays in the workspace
  bool likely_l2 = false;        // (m) best_config uses the L2 rate of this model
  bool device_flags = false;     // (o) flags are copied from this GPU's memory, not the host's
  bool informed = false;         // (p) best_config knows when rows arrive and leave
  bool in_turns = false;  // (n) rows leave chunk by chunk, to all ranks; some SMs are kept for sums
  std::vector<kernels::LaunchConfig> tiles{};  // if not empty, the call uses the fastest of these
};

// A design's letter and how to switch it on.
struct Letter {
  char letter;
  bool Design::* on;
};
inline constexpr Letter kLetters[] = {
    {'a', &Design::announce_behind}, {'b', &Design::gemm_first}, {'c', &Design::write_values},
    {'d', &Design::own_in_place},    {'e', &Design::sums_early}, {'f', &Design::grouped},
    {'g', &Design::more_tiles},      {'h', &Design::both},       {'i', &Design::over_hosts},
    {'j', &Design::multimem},        {'k', &Design::two_queues}, {'l', &Design::result_in_place},
    {'m', &Design::likely_l2},       {'n', &Design::in_turns},   {'o', &Design::device_flags},
    {'p', &Design::informed}};

// Returns the design with these letters on top of another, as in with("mce").
inline Design with(const std::string& letters, Design design = {}) {
  for (const Letter& each : kLetters) {
    if (letters.find(each.letter) != std::string::npos) design.*each.on = true;
  }
  return design;
}

}  // namespace axonn::times
