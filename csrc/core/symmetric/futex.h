// Lets a thread sleep until another thread or process changes a word of shared memory. The sleeper
// only reads the word, so a read-only mapping is enough.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace axonn::comm {

// Returns once the word is woken, no longer holds `expected`, or the time is up. It may also return
// spuriously.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                       std::chrono::nanoseconds timeout) {
  const timespec relative{timeout.count() / 1'000'000'000, timeout.count() % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

// Wakes all threads that sleep on the word, in any process.
inline void futex_wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace axonn::comm
