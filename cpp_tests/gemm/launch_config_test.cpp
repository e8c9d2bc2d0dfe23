#include "core/gemm/launch_config.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "core/gemm/sm90_tiles.h"

namespace axonn::kernels {
namespace {

constexpr GemmProblem kLarge{.m = 8192, .n = 4096, .k = 4096};

LaunchConfig hopper() { return {128, 256, 64, 4, 8, 4, 2, 1, 132}; }

std::string why(const LaunchConfig& config, const GemmProblem& problem = kLarge,
                const Residency& residency = {}, const DeviceLimits& limits = kSm90) {
  return why_illegal(config, problem, residency, limits);
}

TEST(LaunchConfig, EveryCandidateIsLegal) {
  for (const int64_t bytes : {2, 4}) {
    auto problem = kLarge;
    problem.element_bytes = bytes;
    const auto configs = candidates(kSm90, bytes);
    EXPECT_FALSE(configs.empty());
    for (auto config : configs) {
      config.num_ctas = max_ctas(config, {}, kSm90);
      EXPECT_EQ(why(config, problem), "");
    }
  }
  auto other = kSm90;
  other.architecture = 70;
  EXPECT_TRUE(candidates(other, 2).empty());
  EXPECT_FALSE(best_config(kLarge, {}, other));
}

// The kernels are built from the same list, so every config that is chosen exists.
TEST(Sm90Tiles, AreTheCandidatesOfTheirArchitecture) {
  for (const int64_t bytes : {2, 4}) {
    const auto configs = candidates(kSm90, bytes);
    ASSERT_EQ(configs.size(), kNumSm90Tiles);
    for (std::size_t i = 0; i < kNumSm90Tiles; ++i) {
      EXPECT_EQ(configs[i].describe(), config_of(kSm90Tiles[i], bytes).describe());
    }
  }
}

TEST(Sm90Tiles, AreAllDifferent) {
  std::set<std::string> tiles;
  for (const Sm90Tile& tile : kSm90Tiles) tiles.insert(config_of(tile, 2).describe());
  EXPECT_EQ(tiles.size(), kNumSm90Tiles);
}

TEST(Sm90Tiles, AreAskedForByDifferentNames) {
  std::set<std::string> names;
  for (const auto& config : candidates(kSm90, 2)) names.insert(config.tile());
  EXPECT_EQ(names.size(), kNumSm90Tiles);
}

TEST(LaunchConfig, TheBestIsThatOfTheLegalOnesWithTheLeastModelledTime) {
  for (const int64_t m : {1, 512, 2048, 8192, 16384}) {
    const GemmProblem problem{.m = m, .n = 11008, .k = 4096};
    const auto legal = legal_configs(problem, {}, kSm90);
    ASSERT_EQ(legal.size(), kNumSm90Tiles);
    const auto best = best_config(problem, {}, kSm90);
    ASSERT_TRUE(best);
    const double least = cost_us(*best, problem, kSm90);
    bool found = false;
    for (const auto& [config, us] : legal) {
      EXPECT_EQ(why(config, problem), "");
      EXPECT_EQ(us, cost_us(config, problem, kSm90));
      EXPECT_GE(us, least);
      found = found || config.describe() == best->describe();
    }
    EXPECT_TRUE(found);
  }
  EXPECT_TRUE(legal_configs({.m = 8, .n = 9, .k = 8}, {}, kSm90).empty());
  EXPECT_TRUE(legal_configs({.m = 8, .n = 8, .k = 8, .element_bytes = 0}, {}, kSm90).empty());
}

// num_stages must be the maximum: one more stage would not fit or exceeds the limit.
TEST(Sm90Tiles, HaveAsManyStagesAsFit) {
  for (const Sm90Tile& tile : kSm90Tiles) {
    auto config = config_of(tile, 2);
    EXPECT_TRUE(fits_shared_memory(config, 2, kSm90)) << config.describe();
    ++config.num_stages;
    EXPECT_FALSE(fits_shared_memory(config, 2, kSm90) && has_possible_stages(config))
        << config.describe();
  }
}

// Every line of the list must pass these rules to compile.
TEST(Sm90Tiles, RulesTellWhatTheHardwareCannotRun) {
  const auto with = [](int block_m, int block_n, int num_stages, int cluster_m) {
    return config_of({block_m, block_n, num_stages, cluster_m, 1, Schedule::kCooperative}, 2);
  };
  const auto in_turn = [](int block_m, int block_n) {
    return config_of({block_m, block_n, 4, 2, 1, Schedule::kPingpong}, 2);
  };
  const auto edges = [](const LaunchConfig& c) { return edges_are_whole_instructions(c, kSm90); };
  EXPECT_TRUE(edges(with(128, 256, 4, 2)));
  EXPECT_FALSE(edges(with(64, 256, 4, 2)));  // rows for one warpgroup, but there are two
  EXPECT_TRUE(edges(in_turn(64, 256)));
  EXPECT_FALSE(edges(in_turn(96, 256)));
  EXPECT_FALSE(edges(with(192, 128, 4, 2)));
  EXPECT_FALSE(edges(with(128, 132, 4, 2)));
  EXPECT_FALSE(has_positive_sizes(with(128, 256, 4, 0)));
  EXPECT_FALSE(fits_one_load(with(128, 264, 3, 2), kSm90));
  EXPECT_FALSE(fits_registers(with(256, 256, 2, 2), kSm90));
  EXPECT_TRUE(fits_registers(in_turn(128, 128), kSm90));
  EXPECT_FALSE(fits_registers(in_turn(128, 256), kSm90));  // one warpgroup holds the whole tile
  EXPECT_FALSE(has_possible_stages(with(128, 128, 1, 2)));
  EXPECT_FALSE(has_possible_stages(with(128, 64, 9, 2)));
  EXPECT_FALSE(fits_shared_memory(with(128, 256, 5, 2), 2, kSm90));
  EXPECT_FALSE(fits_cluster(with(128, 256, 4, 16), kSm90));
}

TEST(LaunchConfig, MessagesCarryConfigAndNumbers) {
  EXPECT_EQ(why(hopper()), "");
  auto config = hopper();
  config.num_stages = 5;
  EXPECT_EQ(why(config),
            "launch config 128x256x64, 5 stages, 8+4 warps, cluster 2x1, 132 CTAs on sm_90: needs "
            "263168 bytes of shared memory, at most 232448 fit");
}

TEST(LaunchConfig, RefusesWhatDoesNotFit) {
  const auto refused = [](auto&& change, const std::string& part) {
    auto config = hopper();
    change(config);
    const auto message = why(config);
    EXPECT_NE(message.find(part), std::string::npos) << "got '" << message << "'";
  };
  refused([](auto& c) { c.block_m = 0; }, "every size must be positive");
  refused([](auto& c) { c.num_producer_warps = -1; }, "every size must be positive");
  refused([](auto& c) { c.block_k = 24; }, "block_k of 48 bytes must be a multiple of 32");
  refused([](auto& c) { c.num_math_warps = 6; }, "num_math_warps=6 must be a multiple of 4");
  const auto in_turn = [](auto& c) {
    c.schedule = Schedule::kPingpong;
    c.num_math_warps = 4;  // each of the two alternating tiles would get half a warpgroup
  };
  refused(in_turn, "num_math_warps=4 must be a multiple of 8");
  refused([](auto& c) { c.block_m = 192; }, "must be multiples of 128 and 8");
  refused([](auto& c) { c.block_n = 260; }, "must be multiples of 128 and 8");
  refused([](auto& c) { c.block_n = 512; }, "must be at most 256");
  refused([](auto& c) { c.block_m = 256; }, "needs 256 accumulators a thread, at most 192 fit");
  refused([](auto& c) { c.num_producer_warps = 28; }, "needs 1152 threads, at most 1024 fit");
  refused([](auto& c) { c.num_stages = 1; }, "num_stages=1 must be 2 to 8");
  refused([](auto& c) { c.cluster_m = 16; }, "clusters of 16 CTAs, at most 8 are possible");
  refused([](auto& c) { c.num_ctas = 131; }, "num_ctas=131 must be 1 to 132 in clusters of 2");
  refused([](auto& c) { c.num_ctas = 0; }, "num_ctas=0 must be");
  refused([](auto& c) { c.num_ctas = 134; }, "num_ctas=134 must be");
}

TEST(LaunchConfig, RefusesProblemsThatItCannotLoad) {
  auto problem = kLarge;
  problem.k = 4100;
  EXPECT_NE(why(hopper(), problem).find("rows of 8200 bytes"), std::string::npos);
  problem = kLarge;
  problem.n = 7;
  EXPECT_NE(why(hopper(), problem).find("rows of 14 bytes"), std::string::npos);
  problem = kLarge;
  problem.m = -1;
  EXPECT_NE(why(hopper(), problem).find("must not be negative"), std::string::npos);
  problem = kLarge;
  problem.element_bytes = 8;
  EXPECT_NE(why(hopper(), problem).find("2 or 4 bytes, got 8"), std::string::npos);
  problem = kLarge;
  problem.batches = 0;
  EXPECT_NE(why(hopper(), problem).find("rows in 0 batches"), std::string::npos);
  problem = kLarge;
  problem.m = 1001;  // ragged rows are legal
  EXPECT_EQ(why(hopper(), problem), "");
}

TEST(LaunchConfig, EdgesOfChunksMustBeEdgesOfTiles) {
  auto problem = kLarge;
  problem.chunk_tile_m = 256;
  EXPECT_EQ(why(hopper(), problem), "");
  problem.chunk_tile_m = 64;
  EXPECT_NE(why(hopper(), problem).find("edges of chunks (64, 0) must be edges of tiles"),
            std::string::npos);
  problem.chunk_tile_m = 0;
  problem.chunk_tile_n = 128;
  EXPECT_NE(why(hopper(), problem), "");
}

// Keeps a spinning grid from starving the producer of its flags (see protocol_residency_test).
TEST(LaunchConfig, TheGridLeavesRoomForProducers) {
  auto config = hopper();
  EXPECT_EQ(max_ctas(config, {}, kSm90), 132);
  EXPECT_EQ(max_ctas(config, {.ranks_per_device = 1, .producer_ctas = 4}, kSm90), 128);
  EXPECT_EQ(max_ctas(config, {.ranks_per_device = 4, .producer_ctas = 4}, kSm90), 28);
  // 66 SMs each, less 3, leave 63; clusters of two use 62 of them.
  EXPECT_EQ(max_ctas(config, {.ranks_per_device = 2, .producer_ctas = 3}, kSm90), 62);
  EXPECT_EQ(max_ctas(config, {.ranks_per_device = 33, .producer_ctas = 4}, kSm90), 0);
  EXPECT_EQ(max_ctas(config, {.ranks_per_device = 66, .producer_ctas = 4}, kSm90), 0);
  const Residency shared{.ranks_per_device = 2, .producer_ctas = 2};
  const auto message = why(config, kLarge, shared);
  EXPECT_NE(message.find("must be 1 to 64 in clusters of 2: 132 SMs for 2 ranks, each of which "
                         "keeps 2 free for producers"),
            std::string::npos)
      << message;
  config.num_ctas = 64;
  EXPECT_EQ(why(config, kLarge, shared), "");
  EXPECT_NE(why(config, kLarge, {.ranks_per_device = 0, .producer_ctas = 0}), "");
}

TEST(LaunchConfig, TheGridLeavesSmsToOthers) {
  const auto config = hopper();
  EXPECT_EQ(max_ctas(config, {.free_sms = 24}, kSm90), 108);
  EXPECT_EQ(max_ctas(config, {.producer_ctas = 8, .free_sms = 16}, kSm90), 108);
  EXPECT_EQ(max_ctas(config, {.free_sms = 1}, kSm90), 130) << "whole clusters";
  // At most half of the SMs are kept free, so a GEMM runs on any device and with any setting.
  EXPECT_EQ(max_ctas(config, {.free_sms = 1000}, kSm90), 66);
  EXPECT_EQ(max_ctas(config, {.ranks_per_device = 4, .free_sms = 1000}, kSm90), 16);
  EXPECT_EQ(max_ctas(config, {.producer_ctas = 8, .free_sms = 1000}, kSm90), 62);
  const auto best = best_config(kLarge, {.free_sms = 24}, kSm90);
  ASSERT_TRUE(best);
  EXPECT_LE(best->num_ctas, 108);
}

TEST(Cost, IsWavesTimesTheTimeOfATile) {
  const auto config = hopper();
  // 32 x 16 tiles on 132 CTAs are 4 waves; twice the rows take 8.
  auto once = kLarge, twice = kLarge;
  once.m = 32 * 128;
  twice.m = 64 * 128;
  auto none = kLarge;
  none.m = 0;
  const double launch = cost_us(config, none, kSm90);
  const double wave = (cost_us(config, once, kSm90) - launch) / 4;
  EXPECT_NEAR(cost_us(config, twice, kSm90), launch + 8 * wave, 1e-6);
  // Tiles beyond four full waves cost a fifth wave.
  auto more = once;
  more.m += 256;
  EXPECT_NEAR(cost_us(config, more, kSm90), launch + 5 * wave, 1e-6);
  // 128 x 256 x 4096 on one SM at peak: 2 * 2^27 flops at 4096 per cycle.
  const double peak = 2.0 * 128 * 256 * 4096 / 4096 / (kSm90.clock_ghz * 1e3);
  EXPECT_GT(wave, peak);
  EXPECT_LT(wave, 1.1 * peak);
}

// With pingpong, the epilogue of one wave overlaps the math of the next.
TEST(Cost, PingpongHidesEpilogues) {
  LaunchConfig config{128, 128, 64, 6, 8, 4, 2, 1, 132};
  auto pingpong = config;
  pingpong.schedule = Schedule::kPingpong;
  const auto waves_us = [](const LaunchConfig& of, int64_t waves, int64_t k) {
    return cost_us(of, {.m = 132 * 128 * waves, .n = 128, .k = k}, kSm90);
  };
  EXPECT_NEAR(waves_us(pingpong, 1, 4096), waves_us(config, 1, 4096), 1e-9);
  const double epilogue = waves_us(config, 1, 0) - waves_us(config, 0, 0);
  for (const int64_t waves : {2, 3, 10}) {
    const auto hidden = static_cast<double>(waves - 1) * epilogue;
    EXPECT_NEAR(waves_us(pingpong, waves, 4096), waves_us(config, waves, 4096) - hidden, 1e-9);
    EXPECT_GT(waves_us(pingpong, waves, 64), waves_us(config, waves, 64) - hidden)
        << "the math is shorter than the epilogue";
  }
}

TEST(Cost, ClustersShareLoads) {
  // 64 x 128 x 64: 256 cycles of math; its 24 KB take 384 cycles to load, or 16 KB in pairs.
  auto limits = kSm90;
  limits.l2_bytes_per_cycle = 64;
  LaunchConfig alone{64, 128, 64, 8, 4, 4, 1, 1, 132};
  auto pair = alone;
  pair.cluster_m = 2;
  const auto tile_us = [&](const LaunchConfig& config) {
    auto shallow = kLarge;
    shallow.k = 0;
    return cost_us(config, kLarge, limits) - cost_us(config, shallow, limits);
  };
  EXPECT_NEAR(tile_us(pair) / tile_us(alone), 256.0 / 384, 1e-9);
}

// Eight chunks, one of them local: the product of the last one begins when all have arrived.
TEST(Cost, WaitsForTheLastThatArrives) {
  const auto config = hopper();
  const GemmProblem chunk{.m = 256, .n = 256, .k = 4096};
  for (const bool columns : {false, true}) {
    GemmProblem problem = chunk;
    (columns ? problem.n : problem.m) *= 8;
    const double alone = cost_us(config, problem, kSm90);
    problem.arriving = {.count = 8, .own = 1, .each_us = 1000, .columns = columns};
    EXPECT_NEAR(cost_us(config, problem, kSm90), 7 * 1000 + cost_us(config, chunk, kSm90), 1e-6);
    problem.arriving.each_us = 0;
    EXPECT_NEAR(cost_us(config, problem, kSm90), alone, 1e-6);
  }
}

// Chunks that arrive faster than they are multiplied cost nothing, if there is other work to do
// before they arrive.
TEST(Cost, FastArrivalsCostNothingBehindTheOwnChunk) {
  const auto config = hopper();
  GemmProblem problem{.m = 8 * 4096, .n = 4096, .k = 4096};
  const double alone = cost_us(config, problem, kSm90);
  problem.arriving = {.count = 8, .own = 1, .each_us = alone / 16};
  EXPECT_NEAR(cost_us(config, problem, kSm90), alone, 1e-6);
  problem.arriving.own = 0;  // no chunk is local: the whole product waits for the first
  EXPECT_NEAR(cost_us(config, problem, kSm90), alone * 17 / 16, 1e-6);
}

// Four waves of 64 KB tiles on 132 CTAs.
TEST(Cost, WhatLeavesLeavesBehindItsWave) {
  const auto config = hopper();
  GemmProblem problem{.m = 132 * 128, .n = 4 * 256, .k = 4096};
  const double alone = cost_us(config, problem, kSm90);
  auto wave = problem;
  wave.n = 256;
  const double first = cost_us(config, wave, kSm90);
  const double bytes = 132 * 128 * 256 * 2.0;
  const auto cost = [&](double share, double gbps) {
    problem.leaving = {share, gbps};
    return cost_us(config, problem, kSm90);
  };
  EXPECT_NEAR(cost(1, 1e4), alone + bytes / 1e7, 1e-6) << "a fast link sends the last wave last";
  EXPECT_NEAR(cost(1, 1), first + 4 * bytes / 1e3, 1e-6) << "a slow one has all to send";
  EXPECT_NEAR(cost(0.75, 1e4), alone, 1e-6) << "the last wave stays";
  EXPECT_NEAR(cost(0.5, 1), first + 2 * bytes / 1e3, 1e-6);
}

TEST(BestConfig, LargeProblemsTakeLargeTilesAndSmallOnesSmall) {
  const auto large = best_config(kLarge, {}, kSm90);
  ASSERT_TRUE(large);
  EXPECT_EQ(large->block_m * large->block_n, 128 * 256);
  const GemmProblem narrow{.m = 256, .n = 512, .k = 4096};
  const auto small = best_config(narrow, {}, kSm90);
  ASSERT_TRUE(small);
  EXPECT_EQ(small->block_m * small->block_n, 64 * 128);
}

// Small tiles need more L2 bandwidth than there is while they multiply. They pay off only where
// large tiles would leave much of the last wave idle.
TEST(BestConfig, SmallTilesMustSaveMoreThanTheirLoadsCost) {
  const auto columns = [](int64_t m, int64_t n, int64_t k) {
    const auto best = best_config({.m = m, .n = n, .k = k}, {}, kSm90);
    return best.has_value() ? best->block_n : 0;
  };
  // 15 columns of 64 rows of tiles make 7.3 waves, and 29 columns make 14.1.
  EXPECT_EQ(columns(8192, 3696, 8192), 256);
  EXPECT_EQ(columns(16384, 6144, 12288), 256);
  EXPECT_EQ(columns(8192, 12288, 6144), 256);
  EXPECT_EQ(columns(1024, 1376, 4096), 128);  // one wave with either tile, most of it idle
}

// The tile that is fastest by itself is not the one that ends soonest after the last rows arrive.
TEST(BestConfig, RowsThatArriveLateTakeSmallTiles) {
  GemmProblem problem{.m = 2048, .n = 1376, .k = 4096};
  const auto tile = [&] {
    const auto best = best_config(problem, {}, kSm90);
    return best ? best->block_m * best->block_n : 0;
  };
  EXPECT_EQ(tile(), 128 * 256);
  problem.arriving = {.count = 8, .own = 1, .each_us = 9};
  EXPECT_EQ(tile(), 64 * 128);
  problem.arriving.each_us = 0.1;
  EXPECT_EQ(tile(), 128 * 256);
}

// When 1024 rows leave for eight ranks, each rank gets 128. A cluster of 256 rows would compute
// another 128 that nobody needs.
TEST(BestConfig, RowsThatLeaveAreNotFilledUp) {
  GemmProblem problem{.m = 1024, .n = 8192, .k = 3584};
  const auto rows = [&] {
    const auto best = best_config(problem, {}, kSm90);
    return best ? best->block_m * best->cluster_m : 0;
  };
  EXPECT_EQ(rows(), 256);
  problem.batches = 8;
  EXPECT_EQ(rows(), 128);
  problem.m = 8192;
  EXPECT_EQ(rows(), 256);
}

TEST(BestConfig, IsTheLegalCandidateOfLeastCost) {
  const Residency residency{.ranks_per_device = 2, .producer_ctas = 4};
  for (const int64_t m : {1, 100, 512, 1024, 4096, 16384}) {
    for (const int64_t n : {64, 1024, 11008}) {
      GemmProblem problem{.m = m, .n = n, .k = 4096};
      problem.chunk_tile_m = 128;
      const auto best = best_config(problem, residency, kSm90);
      ASSERT_TRUE(best);
      ASSERT_EQ(why(*best, problem, residency), "");
      EXPECT_EQ(problem.chunk_tile_m % best->block_m, 0);
      for (auto config : candidates(kSm90, 2)) {
        config.num_ctas = max_ctas(config, residency, kSm90);
        if (!why(config, problem, residency).empty()) continue;
        EXPECT_LE(cost_us(*best, problem, kSm90), cost_us(config, problem, kSm90));
      }
    }
  }
}

TEST(BestConfig, NoneWhereNothingIsLegal) {
  EXPECT_FALSE(best_config({.m = 128, .n = 128, .k = 3}, {}, kSm90));
  EXPECT_FALSE(best_config(kLarge, {.ranks_per_device = 132, .producer_ctas = 1}, kSm90));
  EXPECT_FALSE(best_config(kLarge, {.ranks_per_device = 0, .producer_ctas = 0}, kSm90));
  auto problem = kLarge;
  problem.element_bytes = 0;
  EXPECT_FALSE(best_config(problem, {}, kSm90));
}

}  // namespace
}  // namespace axonn::kernels
