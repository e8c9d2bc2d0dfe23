// Waits for another rank, for a bounded time.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace axonn::comm {

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Estimates from the waits of one thread whether ranks outnumber cores.
class Crowding {
 public:
  bool expected() const { return num_expected_ > 0; }
  // A long yield means that another rank with work to do took the core; the next yields will be
  // long, too.
  void saw_yield(std::chrono::nanoseconds time) {
    if (time > std::chrono::microseconds(200)) num_expected_ = 64;
  }
  // Each sleep lowers the estimate, so a wait yields again once in a while.
  void slept() { --num_expected_; }

 private:
  int num_expected_ = 0;
};

// Returns the time until `done()` held, not counting the first spins. It spins first (a peer with
// its own core answers within microseconds), then yields, then calls `sleep(t)`, which returns
// after at most t and should return earlier if `done()` may hold. If ranks outnumber cores, it
// sleeps at once, because otherwise it would keep the core from a rank that has work to do.
// `check(elapsed)` ends the wait by throwing. It is called from the first yield or sleep on: after
// every sleep, but at most once a millisecond.
template <typename Done, typename Sleep, typename Check>
std::chrono::nanoseconds bounded_wait(Done&& done, Sleep&& sleep, Check&& check,
                                      Crowding& crowding) {
  using Clock = std::chrono::steady_clock;
  // These spins take about 5 us: longer than a flag takes to cross sockets, and shorter than two
  // context switches.
  constexpr int kSpins = 150;
  // Waking an idle core takes tens of microseconds, so a rank that has the core to itself goes on
  // polling for a while.
  constexpr auto kYieldTime = std::chrono::microseconds(100);
  constexpr auto kCheckInterval = std::chrono::milliseconds(1);
  // A sleeper that wakes up to check takes the core, and its caches, from a rank that has work to
  // do. Nothing wakes a sleeper when a peer dies; it notices up to this much later.
  constexpr auto kSleep = std::chrono::milliseconds(20);

  const bool crowded = crowding.expected();
  for (int i = 0; i < (crowded ? 1 : kSpins); ++i) {
    if (done()) return std::chrono::nanoseconds(0);
    cpu_relax();
  }
  const auto start = Clock::now();
  auto now = start, next_check = start;
  if (crowded) crowding.slept();
  while (!done()) {
    const auto before = now;
    if (!crowded && now - start < kYieldTime) {
      sched_yield();
      now = Clock::now();
      crowding.saw_yield(now - before);
    } else {
      sleep(kSleep);
      now = Clock::now();
    }
    if (now >= next_check && !done()) {
      check(std::chrono::duration<double>(now - start));
      next_check = now + kCheckInterval;
    }
  }
  return now - start;
}

}  // namespace axonn::comm
