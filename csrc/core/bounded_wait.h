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

// Returns once `done()` holds, and how long that took beyond the first spins. Spins first (a peer
// with a core of its own answers within microseconds), then yields (where ranks outnumber cores, to
// the rank that is waited for), then calls `sleep(t)`, which returns after t at the latest and
// should return when `done()` may hold. `check(elapsed)` is called about once a millisecond from
// the first yield on and ends the wait by throwing.
template <typename Done, typename Sleep, typename Check>
std::chrono::nanoseconds bounded_wait(Done&& done, Sleep&& sleep, Check&& check) {
  using Clock = std::chrono::steady_clock;
  // About 5 us: longer than a flag takes to cross sockets, shorter than two context switches.
  constexpr int kSpins = 150;
  // Waking an idle core costs tens of microseconds, so a rank that has the core to itself polls on
  // for a while; yields that took longer than this went to another rank that has work to do.
  constexpr auto kYieldTime = std::chrono::microseconds(100);
  constexpr auto kCheckInterval = std::chrono::milliseconds(1);

  for (int i = 0; i < kSpins; ++i) {
    if (done()) return std::chrono::nanoseconds(0);
    cpu_relax();
  }
  const auto start = Clock::now();
  auto now = start, next_check = start;
  while (!done()) {
    if (now - start < kYieldTime) {
      sched_yield();
    } else {
      sleep(kCheckInterval);
    }
    now = Clock::now();
    if (now >= next_check && !done()) {
      check(std::chrono::duration<double>(now - start));
      next_check = now + kCheckInterval;
    }
  }
  return now - start;
}

}  // namespace axonn::comm
