// Waiting for another rank, never forever.
#pragma once

#include <sched.h>
#include <time.h>

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

// Returns once `done()` holds. Spins first (a peer with a core of its own answers within
// microseconds), then yields (ranks may outnumber cores), then naps. `check(elapsed)` is called
// about once a millisecond from the first yield on and ends the wait by throwing.
template <typename Done, typename Check>
void bounded_wait(Done&& done, Check&& check) {
  using Clock = std::chrono::steady_clock;
  // About 10 us: longer than a flag takes to cross sockets, shorter than a scheduler's time slice.
  constexpr int kSpins = 300;
  constexpr int kYields = 2000;
  constexpr auto kCheckInterval = std::chrono::milliseconds(1);
  constexpr timespec kNap{0, 20'000};

  for (int i = 0; i < kSpins; ++i) {
    if (done()) return;
    cpu_relax();
  }
  const auto start = Clock::now();
  auto next_check = start;
  for (int64_t i = 0; !done(); ++i) {
    if (i < kYields) {
      sched_yield();
    } else {
      nanosleep(&kNap, nullptr);
    }
    if (const auto now = Clock::now(); now >= next_check) {
      check(std::chrono::duration<double>(now - start));
      next_check = now + kCheckInterval;
    }
  }
}

}  // namespace axonn::comm
