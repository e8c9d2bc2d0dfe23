// Sleeping until another thread or process changes a word of shared memory. The sleeper needs to
// read the word only: a read-only mapping will do.
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

// Returns once the word is woken, no longer holds `expected`, or the time is up; or for no reason.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                       std::chrono::nanoseconds timeout) {
  const timespec relative{timeout.count() / 1'000'000'000, timeout.count() % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

// Wakes all who sleep on the word, in whatever process.
inline void futex_wake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace axonn::comm
