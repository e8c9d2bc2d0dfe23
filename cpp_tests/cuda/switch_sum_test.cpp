#include "core/cuda/fused/switch_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/sm90/plans.h"
#include "core/gemm/sm90_tiles.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::kernels::cuda {
namespace {

TEST(SwitchSum, PartsFollowEachOtherAndCoverAllRows) {
  for (int64_t rows = 1; rows <= 20'000; rows += rows < 3000 ? 1 : 97) {
    const SwitchParts parts = SwitchParts::of(rows);
    ASSERT_GE(parts.count(), 1) << rows;
    ASSERT_LE(parts.count(), kMaxChunks) << rows;
    ASSERT_EQ(rows % parts.batches, 0) << rows;
    int64_t before = 0;
    for (int32_t part = 0; part < parts.count(); ++part) {
      const int64_t end = parts.row_end(rows, part);
      ASSERT_GE(end, before) << rows;
      before = end;
    }
    ASSERT_EQ(before, rows);
  }
}

TEST(SwitchSum, ManyRowsAreManyParts) {
  EXPECT_EQ(SwitchParts::of(255).count(), 1);
  EXPECT_EQ(SwitchParts::of(512).count(), 2);
  EXPECT_EQ(SwitchParts::of(1024).count(), 4);
  EXPECT_EQ(SwitchParts::of(4096).count(), 16);
  EXPECT_EQ(SwitchParts::of(8192).count(), kMaxChunks);
  EXPECT_EQ(SwitchParts::of(1 << 20).count(), kMaxChunks);
  EXPECT_EQ(SwitchParts::of(8191).count(), 4) << "what cannot be batches is chunks of one";
}

// The parts are the chunks that a GEMM announces, and its tiles come in row order.
TEST(SwitchSum, PartsAreTheChunksOfTheGemm) {
  for (const int64_t rows : {80, 512, 1040, 2048, 8192, 12'344}) {
    const SwitchParts parts = SwitchParts::of(rows);
    FusedGemm gemm{};
    gemm.m = rows;
    gemm.n = 512;
    gemm.departures.num_ranks = parts.batches;
    gemm.departures.rank = parts.batches - 1;
    gemm.departures.chunks_per_shard = parts.chunks_per_batch;
    for (const Sm90Tile& tile : kSm90Tiles) {
      const LaunchConfig config = config_of(tile, kSm90ElementBytes);
      EXPECT_EQ(sm90::tile_grid(gemm, config).order.first_batch, 0u);
      const auto plan = sm90::departure_plan(gemm, config);
      for (int32_t part = 0; part < parts.count(); ++part) {
        const int64_t batch = part / parts.chunks_per_batch, batch_rows = rows / parts.batches;
        const int64_t end = plan.row_end[part % parts.chunks_per_batch] * config.block_m;
        EXPECT_EQ(parts.row_end(rows, part), batch * batch_rows + std::min(end, batch_rows));
      }
    }
  }
}

TEST(SwitchSum, LeavesItsSmsAndTheGemmACluster) {
  LaunchConfig config = config_of(kSm90Tiles[0], kSm90ElementBytes);
  for (const int64_t ctas : {2, 4, 8, 100, 132}) {
    config.num_ctas = ctas;
    const int64_t left = beside_switch_sum(config).num_ctas;
    EXPECT_EQ(left % (config.cluster_m * config.cluster_n), 0);
    EXPECT_GE(left, 2);
    EXPECT_LE(left, std::max<int64_t>(ctas - switch_sum_ctas(ctas), 2));
  }
  EXPECT_EQ(beside_switch_sum(config).num_ctas, 116);
}

// The tile is the best one for the SMs that are left; the grid is that of all SMs.
TEST(SwitchSum, TheTileIsChosenForTheSmsThatAreLeft) {
  int differ = 0;
  for (const int64_t m : {1024, 2048, 4096, 8192}) {
    for (const int64_t n : {4096, 8192, 12'288, 16'384}) {
      const GemmProblem problem{.m = m, .n = n, .k = 3584};
      const auto beside = best_config_beside_switch_sum(problem, {}, kSm90);
      ASSERT_TRUE(beside);
      EXPECT_EQ(beside->num_ctas, max_ctas(*beside, {}, kSm90));
      DeviceLimits left = kSm90;
      left.num_sms = 116;
      const auto best = best_config(problem, {}, left);
      EXPECT_EQ(beside_switch_sum(*beside).describe(), best->describe());
      differ += best->block_n != best_config(problem, {}, kSm90)->block_n;
    }
  }
  EXPECT_GT(differ, 0);
  EXPECT_FALSE(best_config_beside_switch_sum({.m = 8, .n = 8, .k = 3}, {}, kSm90));
}

// On 24 SMs, each of eight ranks has three: one for its producer, and two for a cluster. Without an
// eighth of the SMs, one would be left, which is no whole cluster.
TEST(SwitchSum, AGridOfOneClusterIsKept) {
  const GemmProblem problem{.m = 1024, .n = 512, .k = 256};
  const Residency residency{.ranks_per_device = 8, .producer_ctas = 1};
  DeviceLimits limits = kSm90;
  limits.num_sms = 24;
  const auto config = best_config_beside_switch_sum(problem, residency, limits);
  ASSERT_TRUE(config);
  EXPECT_EQ(config->num_ctas, 2);
  EXPECT_EQ(beside_switch_sum(*config).num_ctas, 2);
  limits.num_sms = 16;
  EXPECT_FALSE(best_config_beside_switch_sum(problem, residency, limits));
}

TEST(SwitchSum, FlagsFitAPad) {
  const comm::SignalLayout layout{kNumSwitchPhases, kMaxPeers, kMaxChunks};
  EXPECT_LE(layout.num_flags(), comm::kNumSignals - kMaxPeers);
}

}  // namespace
}  // namespace axonn::kernels::cuda
