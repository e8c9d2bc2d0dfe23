#include "core/schedule/tile_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace axonn::kernels {
namespace {

using comm::ChunkIndex;
using comm::ChunkPlan;
using comm::Range;

// Even and ragged shards, tiles larger than a shard, chunks smaller than a tile, empty shards.
std::vector<ChunkPlan> plans(int64_t tile) {
  std::vector<ChunkPlan> result;
  for (const int64_t count : {0, 1, 3, 96, 128, 250, 512, 1023}) {
    for (const int64_t shards : {1, 2, 3, 4, 8}) {
      for (int64_t chunks = 1; chunks <= 4; ++chunks) {
        result.push_back({count, shards, chunks, tile});
      }
    }
  }
  return result;
}

std::string name(const ChunkPlan& plan, int64_t rank) {
  return std::to_string(plan.count) + " in " + std::to_string(plan.num_shards) + " x " +
         std::to_string(plan.chunks_per_shard) + ", tile " + std::to_string(plan.tile) + ", rank " +
         std::to_string(rank);
}

template <typename Check>
void for_each_rank(int64_t tile, Check&& check) {
  for (const auto& plan : plans(tile)) {
    for (int64_t rank = 0; rank < plan.num_shards; ++rank) {
      SCOPED_TRACE(name(plan, rank));
      check(plan, rank);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(PersistentCtas, TakeEveryIndexOnce) {
  for (const int64_t count : {0, 1, 5, 132, 133, 1000}) {
    for (const int64_t ctas : {1, 2, 7, 132}) {
      std::vector<int> taken(static_cast<size_t>(count));
      for (int64_t cta = 0; cta < ctas; ++cta) {
        const int64_t turns = num_turns(count, cta, ctas);
        for (int64_t turn = 0; turn < turns; ++turn) {
          const int64_t index = index_of_turn(turn, cta, ctas);
          ASSERT_LT(index, count);
          ++taken[static_cast<size_t>(index)];
        }
        ASSERT_GE(index_of_turn(turns, cta, ctas), count);
      }
      EXPECT_TRUE(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST(GatherTiles, EveryTileOnce) {
  for_each_rank(16, [](const ChunkPlan& plan, int64_t rank) {
    for (const Along dim : {Along::kRows, Along::kColumns}) {
      const GatherTiles tiles{plan, rank, 32, 3, dim};
      std::set<std::pair<int64_t, int64_t>> seen;
      for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
        const Tile tile = tiles.tile(index);
        const int64_t along = dim == Along::kRows ? tile.m : tile.n;
        const int64_t across = dim == Along::kRows ? tile.n : tile.m;
        ASSERT_TRUE(seen.insert({along, across}).second);
        ASSERT_EQ(tiles.positions(index),
                  (Range{along * 32, std::min(along * 32 + 32, plan.count)}));
        ASSERT_LT(across, 3);
      }
      ASSERT_EQ(static_cast<int64_t>(seen.size()), comm::ceil_div(plan.count, 32) * 3);
    }
  });
}

// Tiles are numbered in the order in which they become ready.
TEST(GatherTiles, WaitOrderIsArrivalOrder) {
  for_each_rank(16, [](const ChunkPlan& plan, int64_t rank) {
    for (const int64_t block : {16, 32, 200}) {
      const GatherTiles tiles{plan, rank, block, 3};
      int64_t step = 0;
      for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
        const int64_t next = plan.gather_step(rank, tiles.last_delivered(index));
        ASSERT_GE(next, step) << "index " << index << ", block " << block;
        step = next;
      }
    }
  });
}

// From the definition: no position of the tile arrives after the chunk it waits for, and all
// positions lie in the span.
TEST(GatherTiles, WaitsForTheLastChunkThatATileTouches) {
  for_each_rank(16, [](const ChunkPlan& plan, int64_t rank) {
    const GatherTiles tiles{plan, rank, 32, 1};
    for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
      const Range positions = tiles.positions(index);
      const int64_t last = plan.gather_step(rank, tiles.last_delivered(index));
      const auto span = tiles.needed(index);
      bool reached = false;
      for (int64_t position = positions.begin; position < positions.end; ++position) {
        const ChunkIndex chunk = plan.at(position);
        ASSERT_LE(plan.gather_step(rank, chunk), last);
        ASSERT_GE(plan.ordinal(chunk), span.first);
        ASSERT_LE(plan.ordinal(chunk), span.last);
        reached = reached || plan.gather_step(rank, chunk) == last;
      }
      ASSERT_TRUE(reached) << "waits for more than it needs";
    }
  });
}

TEST(GatherTiles, StartsAtTheOwnShardAndEndsWithTheTileThatStraddlesIt) {
  // Shards of 250 rows: rank 1 owns 250 .. 499, tiles of 128 start at 256.
  const GatherTiles tiles{{1000, 4, 1, 128}, 1, 128, 2};
  EXPECT_EQ(tiles.tile(0).m, 2);
  EXPECT_EQ(tiles.tile(1).m, 2);
  EXPECT_EQ(tiles.tile(1).n, 1);
  EXPECT_EQ(tiles.last_delivered(0), (ChunkIndex{1, 0}));
  // Rows 128 .. 255 need rank 0's shard, the last to arrive.
  EXPECT_EQ(tiles.tile(tiles.num_tiles() - 1).m, 1);
  EXPECT_EQ(tiles.last_delivered(tiles.num_tiles() - 1), (ChunkIndex{0, 0}));
  EXPECT_EQ(tiles.needed(tiles.num_tiles() - 1).first, 0);
  EXPECT_EQ(tiles.needed(tiles.num_tiles() - 1).last, 1);
}

TEST(ScatterTiles, EveryElementOnceAndDestinationsInOrder) {
  for_each_rank(32, [](const ChunkPlan& plan, int64_t rank) {
    for (const Along dim : {Along::kRows, Along::kColumns}) {
      const ScatterTiles tiles{plan, rank, 16, 3, dim};
      ASSERT_TRUE(tiles.blocks().legal());
      std::set<std::pair<int64_t, int64_t>> seen;
      std::vector<int> covered(static_cast<size_t>(plan.count));
      int64_t step = 0;
      for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
        const Tile tile = tiles.tile(index);
        ASSERT_TRUE(seen.insert({tile.m, tile.n}).second);
        const Range positions = tiles.positions(index);
        ASSERT_GT(positions.size(), 0);
        for (int64_t p = positions.begin; p < positions.end; ++p) ++covered[static_cast<size_t>(p)];
        // A tile is in one chunk, and chunks complete in the order that the protocol visits them.
        const ChunkIndex chunk = tiles.chunk(index);
        ASSERT_EQ(plan.at(positions.end - 1), chunk);
        int64_t next = step;
        while (!(plan.scatter_visit(rank, next) == chunk)) ASSERT_LT(++next, plan.num_chunks());
        step = next;
      }
      ASSERT_TRUE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 3; }));
    }
  });
}

TEST(ScatterTiles, CountsTheTilesOfAChunk) {
  for_each_rank(32, [](const ChunkPlan& plan, int64_t rank) {
    const ScatterTiles tiles{plan, rank, 16, 3};
    std::vector<int64_t> stored(static_cast<size_t>(plan.num_chunks()));
    for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
      ++stored[static_cast<size_t>(plan.ordinal(tiles.chunk(index)))];
    }
    for (int64_t ordinal = 0; ordinal < plan.num_chunks(); ++ordinal) {
      ASSERT_EQ(tiles.tiles_in(plan.from_ordinal(ordinal)), stored[static_cast<size_t>(ordinal)]);
    }
  });
}

TEST(ScatterTiles, PeersFirstAndThePartThatStaysLast) {
  const ScatterTiles tiles{{4 * 256, 4, 2, 128}, 2, 128, 5};
  EXPECT_EQ(tiles.chunk(0), (ChunkIndex{3, 0}));
  EXPECT_EQ(tiles.chunk(5), (ChunkIndex{3, 1}));
  EXPECT_EQ(tiles.chunk(10), (ChunkIndex{0, 0}));
  EXPECT_EQ(tiles.tile(10).m, 0);
  EXPECT_EQ(tiles.chunk(tiles.num_tiles() - 1), (ChunkIndex{2, 1}));
  EXPECT_EQ(tiles.tile(tiles.num_tiles() - 1).m, 5);
}

TEST(ShardBlocks, RefuseEdgesInsideABlock) {
  EXPECT_TRUE((ShardBlocks{{1024, 4, 2, 128}, 64}.legal()));
  EXPECT_FALSE((ShardBlocks{{1024, 4, 2, 128}, 96}.legal()));
  EXPECT_FALSE((ShardBlocks{{1024, 4, 2, 128}, 256}.legal()));
}

TEST(TileSchedule, IsAConstant) {
  constexpr GatherTiles kGather{{4096, 4, 4, 128}, 1, 128, 16};
  static_assert(kGather.tile(0).m == 8);
  constexpr ScatterTiles kScatter{{4096, 4, 4, 128}, 1, 128, 16};
  static_assert(kScatter.chunk(0).shard == 2);
}

}  // namespace
}  // namespace axonn::kernels
