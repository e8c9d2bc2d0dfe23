#include "core/symmetric/bounded_wait.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using Seconds = std::chrono::duration<double>;
using testing::Timer;

// For conditions that nothing wakes a sleeper for.
const auto nap = [](std::chrono::nanoseconds time) { std::this_thread::sleep_for(time / 20); };

double cpu_seconds_of_this_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

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
  constexpr double kWait = 0.1;
  const Timer timer;
  int checks = 0;
  double last = -1;
  bounded_wait([&] { return timer.seconds() > kWait; }, nap,
               [&](Seconds elapsed) {
                 ++checks;
                 EXPECT_GT(elapsed.count(), last);
                 last = elapsed.count();
               },
               crowding);
  // At most one a millisecond, and the one at the start; a busy machine gives fewer.
  EXPECT_LE(checks, static_cast<int>(timer.seconds() * 1e3) + 1);
  EXPECT_GE(checks, 10);
  EXPECT_GT(last, kWait / 2);
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
  EXPECT_LT(timer.seconds(), 1);
}

// Ranks may outnumber cores: a waiting rank must leave its core to the one it waits for.
TEST(BoundedWait, ALongWaitBurnsLittleTime) {
  Crowding crowding;
  constexpr double kWait = 0.3;
  const double cpu = cpu_seconds_of_this_thread();
  const Timer timer;
  bounded_wait([&] { return timer.seconds() > kWait; }, nap, [](Seconds) {}, crowding);
  EXPECT_LT(cpu_seconds_of_this_thread() - cpu, kWait / 3);
}

// Where a yield went to a rank that has work to do, the next waits leave the core at once.
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
  // A wait that is over before it begins tells nothing.
  crowding.saw_yield(microseconds(500));
  for (int i = 0; i < 1000; ++i) {
    bounded_wait([] { return true; }, nap, [](Seconds) {}, crowding);
  }
  EXPECT_TRUE(crowding.expected());
}

}  // namespace
}  // namespace axonn::comm
