#include "core/schedule/chunk_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace axonn::comm {
namespace {

std::vector<ChunkPlan> plans() {
  std::vector<ChunkPlan> result;
  for (const int64_t count : {0, 1, 3, 5, 64, 100, 256, 1000, 1027}) {
    for (const int64_t shards : {1, 2, 3, 4, 8}) {
      for (int64_t chunks = 1; chunks <= kMaxChunksPerShard; ++chunks) {
        for (const int64_t tile : {1, 7, 16, 128}) {
          result.push_back({count, shards, chunks, tile});
        }
      }
    }
  }
  return result;
}

std::string name(const ChunkPlan& plan) {
  return std::to_string(plan.count) + " in " + std::to_string(plan.num_shards) + " x " +
         std::to_string(plan.chunks_per_shard) + ", tile " + std::to_string(plan.tile);
}

TEST(ChunkPlan, ChunksTileTheRangeInOrderWithAlignedEdges) {
  for (const auto& plan : plans()) {
    ASSERT_TRUE(plan.legal());
    int64_t end = 0;
    for (int64_t ordinal = 0; ordinal < plan.num_chunks(); ++ordinal) {
      const ChunkIndex index = plan.from_ordinal(ordinal);
      ASSERT_EQ(plan.ordinal(index), ordinal);
      const Range chunk = plan.chunk(index), shard = plan.shard(index.shard);
      ASSERT_EQ(chunk.begin, end) << name(plan) << ", chunk " << ordinal;
      ASSERT_GE(chunk.size(), 0);
      // Edges of chunks are edges of tiles, except at the end of the shard.
      if (chunk.end != shard.end) {
        ASSERT_EQ((chunk.end - shard.begin) % plan.tile, 0) << name(plan);
      }
      end = chunk.end;
    }
    ASSERT_EQ(end, plan.count) << name(plan);
  }
}

TEST(ChunkPlan, EqualShardsAreCutAlikeAndEvenly) {
  const ChunkPlan plan{.count = 4 * 1000, .num_shards = 4, .chunks_per_shard = 3, .tile = 128};
  for (int64_t shard = 0; shard < 4; ++shard) {
    EXPECT_EQ(plan.chunk({shard, 0}), (Range{shard * 1000, shard * 1000 + 384}));
    EXPECT_EQ(plan.chunk({shard, 1}), (Range{shard * 1000 + 384, shard * 1000 + 768}));
    EXPECT_EQ(plan.chunk({shard, 2}), (Range{shard * 1000 + 768, shard * 1000 + 1000}));
  }
}

TEST(ChunkPlan, MoreChunksThanTilesLeavesEmptyOnes) {
  const ChunkPlan plan{.count = 200, .num_shards = 2, .chunks_per_shard = 4, .tile = 64};
  EXPECT_EQ(plan.chunk({1, 1}), (Range{164, 200}));
  EXPECT_EQ(plan.chunk({1, 2}).size(), 0);
  EXPECT_EQ(plan.chunk({1, 3}), (Range{200, 200}));
}

TEST(ChunkPlan, AtInvertsChunk) {
  for (const auto& plan : plans()) {
    for (int64_t ordinal = 0; ordinal < plan.num_chunks(); ++ordinal) {
      const ChunkIndex index = plan.from_ordinal(ordinal);
      const Range chunk = plan.chunk(index);
      for (int64_t position = chunk.begin; position < chunk.end; ++position) {
        ASSERT_EQ(plan.at(position), index) << name(plan) << ", position " << position;
      }
    }
  }
}

TEST(ChunkPlan, VisitsEveryChunkOnceOwnShardFirstOrLast) {
  for (const auto& plan : plans()) {
    for (int64_t rank = 0; rank < plan.num_shards; ++rank) {
      std::vector<int> gathered(static_cast<size_t>(plan.num_chunks())), scattered = gathered;
      for (int64_t step = 0; step < plan.num_chunks(); ++step) {
        const ChunkIndex first = plan.gather_visit(rank, step);
        const ChunkIndex last = plan.scatter_visit(rank, step);
        ++gathered[static_cast<size_t>(plan.ordinal(first))];
        ++scattered[static_cast<size_t>(plan.ordinal(last))];
        ASSERT_EQ(plan.gather_step(rank, first), step);
        ASSERT_EQ(first.shard == rank, step < plan.chunks_per_shard);
        ASSERT_EQ(last.shard == rank, step >= plan.num_chunks() - plan.chunks_per_shard);
        ASSERT_EQ(last.chunk, step % plan.chunks_per_shard);
      }
      for (const auto& visits : {gathered, scattered}) {
        ASSERT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
      }
    }
  }
}

// Against the definition, which looks at every position.
TEST(ChunkPlan, NeededAndLastDeliveredMatchEveryPosition) {
  for (const auto& plan : plans()) {
    for (const int64_t size : {1, 5, 64, 200}) {
      for (int64_t begin = 0; begin < plan.count; begin += size) {
        const Range positions{begin, std::min(begin + size, plan.count)};
        const ChunkSpan span = plan.needed(positions);
        ASSERT_EQ(span.first, plan.ordinal(plan.at(positions.begin)));
        ASSERT_EQ(span.last, plan.ordinal(plan.at(positions.end - 1)));
        for (int64_t rank = 0; rank < plan.num_shards; ++rank) {
          int64_t latest = -1;
          for (int64_t position = positions.begin; position < positions.end; ++position) {
            latest = std::max(latest, plan.gather_step(rank, plan.at(position)));
          }
          ASSERT_EQ(plan.gather_step(rank, plan.last_delivered(rank, positions)), latest)
              << name(plan) << ", rank " << rank << ", from " << begin;
        }
      }
    }
  }
}

TEST(ChunkPlan, IsAConstant) {
  constexpr ChunkPlan kPlan{4096, 4, 4, 128};
  static_assert(kPlan.chunk({1, 2}).begin == 1024 + 512);
  static_assert(kPlan.at(1024 + 512).chunk == 2);
  static_assert(kPlan.gather_visit(3, 4).shard == 0);
  EXPECT_FALSE((ChunkPlan{-1, 4, 4, 128}.legal()));
  EXPECT_FALSE((ChunkPlan{4096, 4, 0, 128}.legal()));
  EXPECT_FALSE((ChunkPlan{4096, 4, 4, 0}.legal()));
}

// 8192 rows on 4 ranks, 128 x 256 tiles, N = 4096: 16 x 16 tiles per shard, two waves of 132 SMs.
constexpr ChunkPlan kRows{8192, 4, 1, 128};
constexpr PipelineCosts kGpu{.num_workers = 132,
                             .tiles_across = 16,
                             .tile_us = 40,
                             .chunk_us = 5,
                             .shard_us = 60,
                             .persistent = false};

TEST(ChunksThatPay, ModelCountsWavesAndTransfers) {
  // The own shard, then three whose transfers take less time than their matmuls.
  EXPECT_DOUBLE_EQ(modelled_us(kRows, kGpu), 4 * (5 + 2 * 40));
  // In three chunks: 6, 5 and 5 rows of 16 tiles, one wave each.
  auto cut = kRows;
  cut.chunks_per_shard = 3;
  EXPECT_DOUBLE_EQ(modelled_us(cut, kGpu), 4 * 3 * (5 + 40));
  // With next to nothing to compute, every transfer is waited for.
  auto slow_link = kGpu;
  slow_link.tile_us = 0;
  slow_link.shard_us = 1000;
  EXPECT_DOUBLE_EQ(modelled_us(kRows, slow_link), 3 * (5 + 1000) + 5);
}

TEST(ChunksThatPay, WaveQuantisationKeepsLibraryCallsWhole) {
  // The transfer is hidden by the matmuls anyway: cutting a shard of two waves in three would cost
  // another wave, and cutting it in two would only add launches.
  EXPECT_EQ(chunks_that_pay(kRows, kGpu), 1);
  // One wave per shard, cut or not, so each cut adds a wave.
  auto narrow = kGpu;
  narrow.tiles_across = 8;
  EXPECT_EQ(chunks_that_pay(kRows, narrow), 1);
}

TEST(ChunksThatPay, OneKernelCutsWhereTransferIsExposed) {
  auto exposed = kGpu;
  exposed.persistent = true;
  exposed.chunk_us = 1;
  exposed.shard_us = 400;  // longer than a shard's matmul: only the last chunk's matmul shows
  EXPECT_EQ(chunks_that_pay(kRows, exposed), kMaxChunksPerShard);
  exposed.chunk_us = 1000;  // signals cost more than they hide
  EXPECT_EQ(chunks_that_pay(kRows, exposed), 1);
}

TEST(ChunksThatPay, ASlowLinkPaysForLibraryCallsToo) {
  auto slow = kGpu;
  slow.shard_us = 2000;
  const int64_t chunks = chunks_that_pay(kRows, slow);
  EXPECT_EQ(chunks, 2);  // a whole wave each, so smaller chunks gain nothing
  auto cut = kRows;
  cut.chunks_per_shard = chunks;
  EXPECT_LT(modelled_us(cut, slow), modelled_us(kRows, slow));
}

TEST(ChunksThatPay, NothingToDoIsOneChunk) {
  EXPECT_EQ(chunks_that_pay({0, 4, 1, 128}, kGpu), 1);
  EXPECT_EQ(chunks_that_pay({4096, 1, 1, 128}, kGpu), 1);
}

}  // namespace
}  // namespace axonn::comm
