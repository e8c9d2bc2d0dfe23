// The table of waits: an entry can be seen, from any thread, until its wait is over.
#include "core/ranks/waits.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace axonn::comm {
namespace {

Wait some_wait(int64_t number) {
  return {"group", "x", "op", number, {1, 2}, "has not come", WaitClock::now()};
}

std::vector<int64_t> numbers() {
  std::vector<int64_t> found;
  for (const auto& wait : waits_under_way()) found.push_back(wait.number);
  return found;
}

TEST(Waits, AreSeenInTheirOrderUntilTheyAreOver) {
  EXPECT_EQ(numbers(), std::vector<int64_t>{});
  {
    const NotedWait first(some_wait(1));
    std::vector<int64_t> seen;
    {
      const NotedWait second(some_wait(2));
      std::thread([&] { seen = numbers(); }).join();
    }
    EXPECT_EQ(seen, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(numbers(), std::vector<int64_t>{1});
    const auto wait = waits_under_way().front();
    EXPECT_EQ(wait.call, "op");
    EXPECT_EQ(wait.peers, (std::vector<int64_t>{1, 2}));
  }
  EXPECT_EQ(numbers(), std::vector<int64_t>{});
}

TEST(Waits, ManyThreadsMayWaitAndAsk) {
  std::atomic<bool> stop = false;
  std::thread asks([&] {
    while (!stop) EXPECT_LE(numbers().size(), 4U);
  });
  std::vector<std::thread> waiters;
  for (int64_t thread = 0; thread < 4; ++thread) {
    waiters.emplace_back([thread] {
      for (int turn = 0; turn < 1000; ++turn) const NotedWait noted(some_wait(thread));
    });
  }
  for (auto& waiter : waiters) waiter.join();
  stop = true;
  asks.join();
  EXPECT_EQ(numbers(), std::vector<int64_t>{});
}

TEST(Waits, AllButOneRank) {
  EXPECT_EQ(all_but(1, 3), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(all_but(0, 1), std::vector<int64_t>{});
}

}  // namespace
}  // namespace axonn::comm
