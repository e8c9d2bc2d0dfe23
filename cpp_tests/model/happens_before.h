// Checks by vector clocks whether signals alone order all accesses that must not overlap.
//
// One run decides for all runs. A flag is raised to an epoch once, by one rank, so the raise that a
// wait is sure to see does not depend on timing, and neither does what it orders. If signals order
// every conflicting pair of accesses in one run, they do so in every run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "model/protocol_simulator.h"
#include "model/schedulers.h"

namespace axonn::comm::testing {

// Follows one run. Every write of a chunk must be ordered with every other write and read of the
// chunk.
class HappensBefore {
 public:
  explicit HappensBefore(const World& world) : world_(world), threads_(threads_of(world)) {}

  // Returns an empty text if there is no race. The run itself must be free of violations.
  std::string find_race() {
    // As no thread runs ahead, a missing signal does no harm and only shows in the clocks.
    const Scheduler pick = least_advanced();
    clocks_.assign(threads_.size(), Clock(threads_.size(), 0));
    State state(world_, threads_);
    while (!state.all_finished()) {
      const auto enabled = enabled_threads(state, threads_.size());
      if (enabled.empty()) return state.stuck();
      const size_t thread = pick(state, enabled);
      const int64_t at = state.progress(thread);
      if (auto violation = state.advance(thread); !violation.empty()) return violation;
      if (at < 0) {
        follow_stream(thread);
        continue;
      }
      if (state.progress(thread) == at) continue;  // a read that has only begun
      const Step& step = (*threads_[thread].program)[static_cast<size_t>(at)];
      if (auto race = follow(thread, step); !race.empty()) return step.describe() + ": " + race;
    }
    return "";
  }

 private:
  using Clock = std::vector<int64_t>;
  struct Access {
    size_t thread;
    int64_t time;
  };
  struct Half {
    Epoch epoch = 0;
    std::map<int64_t, std::vector<Access>> accesses;  // by flag, of this epoch's call
  };

  Half& half_of(const Step& step, int64_t rank) {
    return halves_[{step.group, rank, step.epoch % static_cast<Epoch>(world_.num_halves)}];
  }

  static void join(Clock& clock, const Clock& other) {
    for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
  }
  bool ordered(const Access& earlier, size_t thread) const {
    return earlier.time <= clocks_[thread][earlier.thread];
  }

  // A kernel starts after the previous kernel of its stream has ended.
  void follow_stream(size_t thread) {
    for (size_t other = 0; other < threads_.size(); ++other) {
      if (threads_[other].stream == threads_[thread].stream &&
          threads_[other].kernel < threads_[thread].kernel) {
        join(clocks_[thread], clocks_[other]);
      }
    }
  }

  std::string follow(size_t thread, const Step& step) {
    Clock& clock = clocks_[thread];
    ++clock[thread];
    switch (step.action) {
      case Action::kSignal:
        raises_[{step.group, step.rank, step.flag, step.epoch}] = clock;
        return "";
      case Action::kComplete:
        raises_[{step.group, step.rank, kCompleted, step.epoch}] = clock;
        return "";
      case Action::kWait:
      case Action::kAwaitCompleted: {
        const int64_t flag = step.action == Action::kWait ? step.flag : kCompleted;
        const auto raise = raises_.find({step.group, step.peer, flag, step.epoch});
        if (raise != raises_.end()) join(clock, raise->second);  // else it precedes all calls
        return "";
      }
      case Action::kWrite: {
        Half& half = half_of(step, step.rank);
        if (half.epoch != step.epoch) {  // calls differ in where their chunks lie
          for (const auto& [flag, accesses] : half.accesses) {
            for (const Access& access : accesses) {
              if (!ordered(access, thread)) return "not ordered after an earlier access";
            }
          }
          half = {step.epoch, {}};
        }
        half.accesses[step.flag] = {{thread, clock[thread]}};
        return "";
      }
      case Action::kRead:
      case Action::kAdd: {
        auto& accesses = half_of(step, step.peer).accesses[step.flag];  // the first is the write
        if (!ordered(accesses.front(), thread)) return "not ordered after the write";
        accesses.push_back({thread, clock[thread]});
        return "";
      }
    }
    return "unknown step";
  }

  static constexpr int64_t kCompleted = -1;
  const World& world_;
  std::vector<Thread> threads_;
  std::vector<Clock> clocks_;
  // By group, rank, flag and epoch.
  std::map<std::tuple<int64_t, int64_t, int64_t, Epoch>, Clock> raises_;
  std::map<std::tuple<int64_t, int64_t, Epoch>, Half> halves_;  // by group, rank, half
};

}  // namespace axonn::comm::testing
