#include "model/times_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/gemm/sm90_tiles.h"
#include "model/times_choice.h"
#include "model/times_library.h"
#include "model/times_ranking.h"

namespace axonn::times {
namespace {

double d(int64_t value) { return static_cast<double>(value); }

// Checks how much a rank sends in a gather or a scatter, and that the call takes at least the time
// that the link or the tensor cores need.
void expect_whole(const CallTimes& times, const Work& work, double sent, double gbps) {
  EXPECT_EQ(times.flops, 2 * d(work.m * work.n * work.k));
  EXPECT_NEAR(times.sent_bytes, sent, 1);
  EXPECT_GE(times.device_us, us_of(sent, gbps));
  EXPECT_GE(times.device_us, times.gemm_us);
  EXPECT_GE(times.gemm_us, times.flops / (kNumSms * kH100.flops_per_cycle * kH100.clock_ghz * 1e3));
  EXPECT_GT(times.host_us, 0);
}

TEST(Calls, MoveEveryByteOnce) {
  for (const char* letters : {"", "mc", "mcbdgk"}) {
    for (const Work& work : gathers()) {
      const double sent = d(work.gathered_bytes()) * 7 / 8;
      expect_whole(all_gather_gemm(work, with(letters)), work, sent, kH100.copy_gbps);
    }
  }
  for (const char* letters : {"", "mae", "maeg"}) {
    for (const Work& work : scatters()) {
      const double scattered = d(work.result_bytes()) * 7 / 8;
      expect_whole(gemm_reduce_scatter(work, with(letters)), work, scattered, kH100.store_gbps);
      const double summed = scattered + d(work.result_bytes());
      expect_whole(gemm_all_reduce(work, with(letters)), work, summed, kH100.store_gbps);
    }
  }
}

TEST(Calls, TakeLongerForMoreRows) {
  const std::vector<Work> works = gathers();
  for (std::size_t i = 1; i < works.size(); ++i) {
    if (works[i].k != works[i - 1].k || works[i].m < works[i - 1].m) continue;
    EXPECT_GT(all_gather_gemm(works[i], {}).us(), all_gather_gemm(works[i - 1], {}).us());
    EXPECT_GT(library_gather_us(works[i]), library_gather_us(works[i - 1]));
  }
}

// A call that finds the GPU idle also waits for its host.
TEST(Calls, TakeLongerBehindAnIdleHost) {
  for (const Work& work : gathers()) {
    EXPECT_GE(all_gather_gemm(work, {}, Host::kIdle).device_us,
              all_gather_gemm(work, {}).device_us);
  }
}

TEST(Sums, TakeTheWholeGpuOrWait) {
  const std::vector<double> free(132, 10);
  // All SMs are free, and all chunks have arrived.
  EXPECT_NEAR(sums_end_us({0, 0, 0, 0}, free, 5, kH100), 30, 1e-6);
  // The last chunk comes late.
  EXPECT_NEAR(sums_end_us({0, 0, 0, 50}, free, 5, kH100), 55 + kH100.seen_us, 1e-6);
  // Half as many SMs as are needed to fill the HBM take twice as long.
  std::vector<double> few(132, 1e6);
  std::fill_n(few.begin(), static_cast<std::size_t>(kH100.sms_for_hbm / 2), 10);
  EXPECT_NEAR(sums_end_us({0}, few, 5, kH100), 20, 1e-6);
}

// The costs by which csrc chooses a tile are rougher than this model, but the tile is the fastest
// one, or nearly so.
TEST(Choices, AreNearlyTheFastest) {
  for (const auto& [call, letters] : {std::pair{Call::kGather, "mop"},
                                      {Call::kGather, "mcp"},
                                      {Call::kScatter, "map"},
                                      {Call::kSum, "map"},
                                      {Call::kSum, "maejp"}}) {
    const std::vector<double> chosen = modelled(call, with(letters));
    std::vector<double> fastest = chosen;
    for (const kernels::Sm90Tile& tile : kernels::kSm90Tiles) {
      Design design = with(letters);
      design.tiles = {
          tile_of(tile.block_m, tile.block_n, tile.cluster_m, tile.cluster_n, tile.schedule)};
      const std::vector<double> times = modelled(call, design);
      for (std::size_t i = 0; i < times.size(); ++i) fastest[i] = std::min(fastest[i], times[i]);
    }
    double sum = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const double most = call == Call::kGather ? 1.01 : 1.05;
      EXPECT_LE(chosen[i], most * fastest[i]) << name_of(call) << letters << " " << i;
      sum += chosen[i] / fastest[i];
    }
    EXPECT_LE(sum, 1.01 * static_cast<double>(chosen.size())) << name_of(call) << letters;
  }
}

// Calls are modelled with the configurations that csrc would choose.
TEST(Choices, AreThoseOfCsrc) {
  EXPECT_EQ(kernels::kNvlink.chunk_us, kH100.copy_us + kH100.write_value_us);
  const Work work{8192, 3584, 8192};
  const auto plain = choices(work, {}, Flow::kArrives);
  ASSERT_EQ(plain.size(), 1u);
  EXPECT_EQ(plain[0].num_ctas, 132);
  for (const kernels::LaunchConfig& tile : choices(work, with("g"), Flow::kDeparts)) {
    EXPECT_EQ(kernels::cuda::kChunkRows % (tile.block_m * tile.cluster_m), 0);
  }
}

}  // namespace
}  // namespace axonn::times
