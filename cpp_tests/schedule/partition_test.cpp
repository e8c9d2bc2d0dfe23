#include "core/schedule/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>

namespace axonn::comm {
namespace {

TEST(Partition, PartsTileTheRangeInOrder) {
  for (const int64_t count : {0, 1, 2, 3, 7, 8, 9, 64, 1000, 1001}) {
    for (int64_t parts = 1; parts <= 17; ++parts) {
      int64_t end = 0, smallest = count, largest = 0;
      for (int64_t index = 0; index < parts; ++index) {
        const auto part = part_of(count, parts, index);
        ASSERT_EQ(part.begin, end) << count << " in " << parts << ", part " << index;
        ASSERT_GE(part.size(), 0);
        end = part.end;
        smallest = std::min(smallest, part.size());
        largest = std::max(largest, part.size());
      }
      EXPECT_EQ(end, count);
      EXPECT_LE(largest - smallest, 1) << count << " in " << parts;
    }
  }
}

TEST(Partition, FirstPartsTakeTheRemainder) {
  EXPECT_EQ(part_of(10, 4, 0), (Range{0, 3}));
  EXPECT_EQ(part_of(10, 4, 1), (Range{3, 6}));
  EXPECT_EQ(part_of(10, 4, 2), (Range{6, 8}));
  EXPECT_EQ(part_of(10, 4, 3), (Range{8, 10}));
}

TEST(Partition, MorePartsThanElementsLeavesEmptyOnes) {
  EXPECT_EQ(part_of(2, 4, 1), (Range{1, 2}));
  EXPECT_EQ(part_of(2, 4, 2), (Range{2, 2}));
  EXPECT_EQ(part_of(2, 4, 3), (Range{2, 2}));
  EXPECT_EQ(part_of(0, 3, 2).size(), 0);
}

TEST(Partition, SizesBeyond32Bits) {
  const int64_t count = (int64_t{1} << 40) + 1;
  EXPECT_EQ(part_of(count, 8, 7).end, count);
  EXPECT_EQ(part_of(count, 8, 0).size(), (count + 7) / 8);
}

TEST(Partition, OrdersVisitEveryRankOnce) {
  for (int64_t size = 1; size <= 9; ++size) {
    for (int64_t rank = 0; rank < size; ++rank) {
      std::set<int64_t> first, last;
      for (int64_t step = 0; step < size; ++step) {
        first.insert(own_first(rank, size, step));
        last.insert(own_last(rank, size, step));
      }
      for (const auto& visited : {first, last}) {
        EXPECT_EQ(static_cast<int64_t>(visited.size()), size);
        EXPECT_EQ(*visited.begin(), 0);
        EXPECT_EQ(*visited.rbegin(), size - 1);
      }
      EXPECT_EQ(own_first(rank, size, 0), rank);
      EXPECT_EQ(own_last(rank, size, size - 1), rank);
    }
  }
}

// If all ranks read from the same peer first, its memory would serve them one after the other.
TEST(Partition, AtEachStepNoTwoRanksVisitTheSamePeer) {
  constexpr int64_t kSize = 8;
  for (int64_t step = 0; step < kSize; ++step) {
    std::set<int64_t> first, last;
    for (int64_t rank = 0; rank < kSize; ++rank) {
      first.insert(own_first(rank, kSize, step));
      last.insert(own_last(rank, kSize, step));
    }
    EXPECT_EQ(first.size(), size_t{kSize});
    EXPECT_EQ(last.size(), size_t{kSize});
  }
}

}  // namespace
}  // namespace axonn::comm
