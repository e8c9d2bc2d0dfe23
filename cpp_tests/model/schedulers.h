// Schedulers, which choose the next thread from those that can go on: at random, or by a rule that
// is bad for some threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "model/protocol_simulator.h"

namespace axonn::comm::testing {

inline Scheduler random_scheduler(uint64_t seed) {
  return
      [engine = std::mt19937_64(seed)](const State&, const std::vector<size_t>& enabled) mutable {
        return enabled[engine() % enabled.size()];
      };
}

inline Scheduler most_advanced() {
  return [](const State& state, const std::vector<size_t>& enabled) {
    return *std::max_element(enabled.begin(), enabled.end(), [&](size_t a, size_t b) {
      return state.progress(a) < state.progress(b);
    });
  };
}

inline Scheduler least_advanced() {
  return [](const State& state, const std::vector<size_t>& enabled) {
    return *std::min_element(enabled.begin(), enabled.end(), [&](size_t a, size_t b) {
      return state.progress(a) < state.progress(b);
    });
  };
}

inline Scheduler round_robin() {
  return [next = size_t{0}](const State&, const std::vector<size_t>& enabled) mutable {
    const auto found = std::lower_bound(enabled.begin(), enabled.end(), next);
    const size_t picked = found == enabled.end() ? enabled.front() : *found;
    next = picked + 1;
    return picked;
  };
}

// `thread` moves only when no other thread can; the others are chosen at random.
inline Scheduler starving(size_t thread, uint64_t seed) {
  return [thread, rest = random_scheduler(seed)](const State& state,
                                                 const std::vector<size_t>& enabled) {
    auto others = enabled;
    others.erase(std::remove(others.begin(), others.end(), thread), others.end());
    return others.empty() ? thread : rest(state, others);
  };
}

}  // namespace axonn::comm::testing
