#include "core/symmetric/bounded_wait.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using Seconds = std::chrono::duration<double>;
using testing::Timer;

// For conditions without anything that wakes a sleeper.
const auto nap = [](std::chrono::nanoseconds time) { std::this_thread::sleep_for(time / 20); };

TEST(BoundedWait, ReturnsAtOnceWithoutACheck) {
  Crowding crowding;
  int asked = 0;
  bounded_wait(
      [&] {
        ++asked;
        return true;
      },
      nap, [](Seconds) { FAIL() << "nothing to check"; }, crowding);
  EXPECT_EQ(asked, 1);
}

TEST(BoundedWait, SeesAnotherThreadsSignal) {
  Crowding crowding;
  for (const int delay_us : {0, 5, 50, 500, 5000, 50000}) {
    std::atomic<bool> done = false;
    std::thread peer([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      done.store(true, std::memory_order_release);
    });
    bounded_wait([&] { return done.load(std::memory_order_acquire); }, nap, [](Seconds) {},
                 crowding);
    EXPECT_TRUE(done);
    peer.join();
  }
}

TEST(BoundedWait, ChecksOnceAMillisecondAtMost) {
  Crowding crowding;
  const Timer timer;
  int checks = 0;
  double last = -1;
  bounded_wait([&] { return checks == 20; }, nap,
               [&](Seconds elapsed) {
                 ++checks;
                 EXPECT_GT(elapsed.count(), last);
                 last = elapsed.count();
               },
               crowding);
  // The first check is at the start; a busy machine takes longer.
  EXPECT_GE(last, 0.019);
  EXPECT_GE(timer.seconds(), last);
}

TEST(BoundedWait, AnExceptionOfTheCheckEndsTheWait) {
  Crowding crowding;
  const Timer timer;
  EXPECT_THROW(bounded_wait([] { return false; }, nap,
                            [](Seconds elapsed) {
                              if (elapsed > Seconds(0.05)) throw std::runtime_error("enough");
                            },
                            crowding),
               std::runtime_error);
  EXPECT_GE(timer.seconds(), 0.05);
}

// Ranks may outnumber cores: a waiting rank must give its core to the rank that it waits for.
TEST(BoundedWait, ALongWaitSleepsBetweenLooks) {
  Crowding crowding;
  int sleeps = 0, asked = 0;
  bounded_wait(
      [&] {
        ++asked;
        return sleeps == 50;
      },
      [&](std::chrono::nanoseconds time) {
        if (sleeps == 0) asked = 0;
        ++sleeps;
        nap(time);
      },
      [](Seconds) {}, crowding);
  EXPECT_LE(asked, 2 * 50);  // once before the next sleep, and once before a check
}

// If a yield went to a rank with work to do, the next waits give up their core at once.
TEST(BoundedWait, SleepsAtOnceWhereRanksOutnumberCores) {
  using std::chrono::microseconds;
  Crowding crowding;
  crowding.saw_yield(microseconds(100));
  EXPECT_FALSE(crowding.expected());
  crowding.saw_yield(microseconds(500));
  int waits = 0;
  while (crowding.expected() && waits < 1000) {
    int asked = 0, asked_before_sleep = -1;
    bounded_wait(
        [&] {
          ++asked;
          return asked_before_sleep >= 0;
        },
        [&](std::chrono::nanoseconds) { asked_before_sleep = asked; }, [](Seconds) {}, crowding);
    EXPECT_LE(asked_before_sleep, 2);
    ++waits;
  }
  EXPECT_GE(waits, 10);
  EXPECT_LT(waits, 1000) << "it never looks whether that still holds";
  // A wait that is over before it begins says nothing about crowding.
  crowding.saw_yield(microseconds(500));
  for (int i = 0; i < 1000; ++i) {
    bounded_wait([] { return true; }, nap, [](Seconds) {}, crowding);
  }
  EXPECT_TRUE(crowding.expected());
}

}  // namespace
}  // namespace axonn::comm
