#include "model/times_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>

#include "model/times_choice.h"

namespace axonn::times {
namespace {

using kernels::LaunchConfig;

constexpr Work kWorks[] = {
    {4096, 3584, 8192}, {1000, 1376, 4096}, {8192, 8192, 1376}, {64, 256, 64}};

TEST(Timeline, AServerServesOneRequestAfterTheOther) {
  Server server;
  EXPECT_EQ(server.serve(2, 3).end, 5);
  EXPECT_EQ(server.serve(1, 1).begin, 5);
  EXPECT_EQ(server.serve(10, 0.5).end, 10.5);
  EXPECT_EQ(server.busy_us(), 4.5);
  EXPECT_LE(server.busy_us(), server.free_us());
}

TEST(Rates, ArePositiveAndHaveSources) {
  std::set<std::string> names;
  for (const Quantity& each : all(kH100)) {
    EXPECT_GT(each.value, 0) << each.name;
    EXPECT_GT(std::string(each.source).size(), 0u) << each.name;
    EXPECT_TRUE(names.insert(each.name).second) << each.name;
  }
  EXPECT_EQ(names.size() * sizeof(Quantity), sizeof(Rates)) << "all() leaves some out";
}

// The tile of csrc whose math is longer than its loads: 1024 cycles for each 64 of K.
TEST(TileTimes, AreThoseOfTheScarcestResource) {
  const auto us = [](int64_t block_m, int64_t block_n, int64_t cluster_m) {
    return tile_times({block_m, block_n, 64, 4, 8, 4, cluster_m, 1, 132}, 64, kH100).mainloop_us;
  };
  const double cycle = 1e-3 / kH100.clock_ghz;
  EXPECT_NEAR(us(128, 256, 2), 1024 * cycle, 1e-9);                                  // tensor cores
  EXPECT_NEAR(us(128, 128, 2), 192 * 128 / kH100.l2_bytes_per_cycle * cycle, 1e-9);  // L2
  EXPECT_GT(us(128, 256, 1), us(128, 256, 2));
  // Twice the depth takes twice the time.
  const LaunchConfig tile{128, 256, 64, 4, 8, 4, 2, 1, 132};
  EXPECT_NEAR(tile_times(tile, 8192, kH100).mainloop_us,
              2 * tile_times(tile, 4096, kH100).mainloop_us, 1e-9);
}

// FP8 tiles with 128 bytes of K take as many cycles and bytes as these. Their ratio is published:
// pytorch/FBGEMM#3617 has 1300 and 1480 TFLOP/s for 8192^3.
TEST(TileTimes, SmallerTilesCostWhatIsPublished) {
  const Work work{8192, 8192, 8192};
  const auto us = [&](int64_t block_n) {
    const LaunchConfig tile{128, block_n, 64, 4, 8, 4, 2, 1, 132};
    return run_gemm(grid_of(work, Flow::kStays, tile), 0, {}, {}, kH100).end_us;
  };
  EXPECT_NEAR(us(128) / us(256), 1480.0 / 1300, 0.05);
}

TEST(RunGemm, ComputesEveryTileOnceInItsOrder) {
  for (const Work& work : kWorks) {
    for (const LaunchConfig& tile : library_tiles()) {
      const GemmGrid grid = grid_of(work, Flow::kStays, tile);
      const GemmRun run = run_gemm(grid, 5, {}, {}, kH100);
      const auto tiles = static_cast<std::size_t>(comm::ceil_div(work.m, tile.block_m) *
                                                  comm::ceil_div(work.n, tile.block_n));
      EXPECT_EQ(run.tiles.size(), tiles);
      EXPECT_EQ(run.flops, 2.0 * static_cast<double>(work.m * work.n * work.k));
      for (const TileRecord& record : run.tiles) {
        EXPECT_GE(record.begin_us, 5);
        EXPECT_GT(record.end_us, record.begin_us);
        EXPECT_GE(record.announced_us, record.end_us);
      }
      const double peak = kNumSms * kH100.flops_per_cycle * kH100.clock_ghz * 1e3;
      EXPECT_GE(run.end_us - 5, run.flops / peak) << "faster than the tensor cores";
    }
  }
}

TEST(RunGemm, TakesLongerForMore) {
  const LaunchConfig tile = library_tiles().front();
  const auto us = [&](const Work& work) {
    return run_gemm(grid_of(work, Flow::kStays, tile), 0, {}, {}, kH100).end_us;
  };
  double before = 0;
  for (int64_t m = 256; m <= 16384; m *= 2) {
    EXPECT_GE(us({m, 4096, 4096}), before);
    before = us({m, 4096, 4096});
    EXPECT_LT(before, us({m, 4096, 8192}));
    EXPECT_LE(before, us({m, 8192, 4096}));
  }
}

TEST(RunGemm, WaitsForWhatArrives) {
  const LaunchConfig tile = library_tiles().front();
  const GemmGrid grid = grid_of({4096, 4096, 4096}, Flow::kArrives, tile);
  const auto late = [](const kernels::TileOrder::Place& place) {
    return place.along >= 8 ? 1e4 : 0;
  };
  const GemmRun run = run_gemm(grid, 0, late, {}, kH100);
  for (const TileRecord& record : run.tiles) {
    EXPECT_GE(record.begin_us, late(record.place));
  }
  const GemmRun free = run_gemm(grid, 0, {}, {}, kH100);
  EXPECT_GE(run.end_us, 1e4);
  EXPECT_LE(run.end_us, 1e4 + free.end_us);
}

// All departing tiles share one link, which carries nothing twice and one tile at a time.
TEST(RunGemm, DepartingBytesAreThoseOfTheOtherRanks) {
  for (const Work& work : {Work{4096, 8192, 3584}, Work{1024, 4096, 1376}}) {
    for (const bool behind : {false, true}) {
      Server port;
      const GemmGrid grid = grid_of(work, Flow::kDeparts, library_tiles().front());
      const GemmRun run = run_gemm(grid, 0, {}, {0, behind, &port}, kH100);
      const double bytes = static_cast<double>(work.result_bytes()) * (work.ranks - 1) / work.ranks;
      EXPECT_NEAR(run.departed_bytes, bytes, 1);
      EXPECT_NEAR(port.busy_us(), us_of(bytes, kH100.store_gbps), 1e-3);
      EXPECT_GE(run.end_us, port.free_us());
      EXPECT_GE(run.end_us, run_gemm(grid, 0, {}, {}, kH100).end_us);
      for (const TileRecord& tile : run.tiles) EXPECT_GE(tile.announced_us, tile.end_us);
    }
  }
}

TEST(RunGemm, TilesThatAreAnnouncedLaterDoNotHoldUpTheMath) {
  const GemmGrid grid = grid_of({8192, 8192, 3584}, Flow::kDeparts, library_tiles().front());
  Server now, behind;
  EXPECT_LT(run_gemm(grid, 0, {}, {0, true, &behind}, kH100).end_us,
            run_gemm(grid, 0, {}, {0, false, &now}, kH100).end_us);
}

}  // namespace
}  // namespace axonn::times
