#include "core/schedule/tile_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "core/schedule/tile_schedule.h"

namespace axonn::kernels {
namespace {

std::vector<TileOrder> orders() {
  std::vector<TileOrder> result;
  for (const uint32_t along : {1U, 2U, 5U, 16U}) {
    for (const uint32_t across : {1U, 3U, 8U}) {
      for (const uint32_t batches : {1U, 2U, 8U}) {
        for (const uint32_t group : {1U, 2U, 3U, 8U}) {
          for (uint32_t first = 0; first < along; ++first) {
            result.push_back({along, across, batches, group, first, first % batches});
          }
        }
      }
    }
  }
  return result;
}

TEST(TileOrder, EveryTileOnce) {
  for (const TileOrder& order : orders()) {
    ASSERT_TRUE(order.legal());
    std::set<std::tuple<uint32_t, uint32_t, uint32_t>> seen;
    for (uint32_t index = 0; index < order.num_tiles(); ++index) {
      const auto [batch, along, across] = order.place(index);
      ASSERT_LT(batch, order.batches);
      ASSERT_LT(along, order.along);
      ASSERT_LT(across, order.across);
      ASSERT_TRUE(seen.insert({batch, along, across}).second);
    }
    ASSERT_EQ(seen.size(), order.along * order.across * order.batches);
  }
}

// Groups follow each other starting at `first`, and batches starting at `first_batch`.
TEST(TileOrder, GroupsAndBatchesInTurn) {
  for (const TileOrder& order : orders()) {
    uint32_t latest = 0;
    for (uint32_t index = 0; index < order.num_tiles(); ++index) {
      const auto at = order.place(index);
      const uint32_t batch = (at.batch + order.batches - order.first_batch) % order.batches;
      const uint32_t along = (at.along + order.along - order.first) % order.along;
      const uint32_t turn = batch * order.along + along / order.group;
      ASSERT_GE(turn, latest);
      latest = turn;
    }
  }
}

// Without groups, this is the order of tile_schedule.h.
TEST(TileOrder, IsTheScheduleWithoutGroups) {
  for (const int64_t count : {96, 250, 512}) {
    for (const int64_t ranks : {1, 2, 4}) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const GatherTiles tiles{{count, ranks, 2, 16}, rank, 32, 3};
        const TileOrder order{.along = static_cast<uint32_t>(tiles.tiles_along()),
                              .across = 3,
                              .first = static_cast<uint32_t>(tiles.along(0))};
        for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
          const auto at = order.place(static_cast<uint32_t>(index));
          ASSERT_EQ(at.along, tiles.tile(index).m);
          ASSERT_EQ(at.across, tiles.tile(index).n);
        }
      }
    }
  }
}

TEST(TileOrder, RefusesWhatItCannotStartAt) {
  EXPECT_FALSE((TileOrder{.along = 4, .first = 4}.legal()));
  EXPECT_FALSE((TileOrder{.batches = 2, .first_batch = 2}.legal()));
  EXPECT_FALSE((TileOrder{.group = 0}.legal()));
  EXPECT_EQ((TileOrder{.along = 0}.num_tiles()), 0U);
}

}  // namespace
}  // namespace axonn::kernels
