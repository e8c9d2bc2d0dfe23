// Waiting for another rank, never forever.
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

// Whether ranks outnumber cores, as the waits of one thread at a time find out.
class Crowding {
 public:
  bool expected() const { return num_expected_ > 0; }
  // A yield took that long: if it went to a rank that has work to do, so will the next ones.
  void saw_yield(std::chrono::nanoseconds time) {
    if (time > std::chrono::microseconds(200)) num_expected_ = 64;
  }
  // Once in a while a wait looks again.
  void slept() { --num_expected_; }

 private:
  int num_expected_ = 0;
};

// Returns once `done()` holds, and how long that took beyond the first spins. Spins first (a peer
// with a core of its own answers within microseconds), then yields, then calls `sleep(t)`, which
// returns after t at the latest and should return when `done()` may hold. Where ranks outnumber
// cores it sleeps at once: whatever else it did would keep a rank that has work to do off the core.
// `check(elapsed)` is called from the first yield or sleep on, after every sleep but once a
// millisecond at most, and ends the wait by throwing.
template <typename Done, typename Sleep, typename Check>
std::chrono::nanoseconds bounded_wait(Done&& done, Sleep&& sleep, Check&& check,
                                      Crowding& crowding) {
  using Clock = std::chrono::steady_clock;
  // About 5 us: longer than a flag takes to cross sockets, shorter than two context switches.
  constexpr int kSpins = 150;
  // Waking an idle core costs tens of microseconds, so a rank that has the core to itself polls on
  // for a while.
  constexpr auto kYieldTime = std::chrono::microseconds(100);
  constexpr auto kCheckInterval = std::chrono::milliseconds(1);
  // A sleeper that looks up takes the core, and its caches, from a rank that has work to do. This
  // is how late a rank hears that a peer has died, which nothing wakes it for.
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
