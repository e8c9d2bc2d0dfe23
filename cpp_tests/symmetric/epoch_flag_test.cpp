#include "core/symmetric/epoch_flag.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <thread>

namespace axonn::comm {
namespace {

constexpr Epoch kLast = std::numeric_limits<Epoch>::max();
constexpr Epoch kFarthest = (Epoch{1} << 31) - 1;  // the largest distance that compares correctly

TEST(EpochFlag, ComparesAroundEveryPointOfTheCircle) {
  for (const Epoch target : {Epoch{0}, Epoch{1}, Epoch{1000}, kFarthest, kFarthest + 1,
                             kFarthest + 2, kLast - 1, kLast}) {
    for (const Epoch distance :
         {Epoch{1}, Epoch{2}, Epoch{1} << 16, Epoch{1} << 30, kFarthest - 1, kFarthest}) {
      EXPECT_TRUE(epoch_reached(target + distance, target)) << target << " + " << distance;
      EXPECT_FALSE(epoch_reached(target - distance, target)) << target << " - " << distance;
    }
    EXPECT_TRUE(epoch_reached(target, target)) << target;
  }
}

TEST(EpochFlag, CountsPastTheWrap) {
  EXPECT_TRUE(epoch_reached(0, kLast));
  EXPECT_FALSE(epoch_reached(kLast, 0));
  EXPECT_TRUE(epoch_reached(3, kLast - 3));
  EXPECT_FALSE(epoch_reached(kLast - 3, 3));
}

// A new arena is all zeros; the first two calls wait for epochs -1 and 0.
TEST(EpochFlag, ZeroCountsAsEverythingBeforeTheFirstCall) {
  EpochFlag flag{};
  EXPECT_TRUE(flag.reached(kLast));
  EXPECT_TRUE(flag.reached(0));
  EXPECT_FALSE(flag.reached(1));
}

TEST(EpochFlag, HasCacheLinesOfItsOwn) {
  EpochFlag flags[3];
  EXPECT_EQ(sizeof(flags), 3 * static_cast<size_t>(kFlagAlignment));
  for (const auto& flag : flags) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(&flag) % static_cast<size_t>(kFlagAlignment), 0u);
  }
}

// The thread sanitizer reports `data` unless raise_to and reached are a release and an acquire.
TEST(EpochFlag, PublishesWhatWasWrittenBefore) {
  EpochFlag there{}, back{};
  int64_t data = 0;
  constexpr Epoch kRounds = 2000;
  std::thread peer([&] {
    for (Epoch epoch = 1; epoch <= kRounds; ++epoch) {
      while (!there.reached(epoch)) std::this_thread::yield();
      EXPECT_EQ(data, 2 * epoch - 1);
      ++data;
      back.raise_to(epoch);
    }
  });
  for (Epoch epoch = 1; epoch <= kRounds; ++epoch) {
    ++data;
    there.raise_to(epoch);
    while (!back.reached(epoch)) std::this_thread::yield();
    EXPECT_EQ(data, 2 * epoch);
  }
  peer.join();
}

}  // namespace
}  // namespace axonn::comm
