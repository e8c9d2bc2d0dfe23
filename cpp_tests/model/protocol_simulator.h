// Runs the programs of several ranks in arbitrary interleavings and reports what goes wrong.
//
// A device has slots (SMs) and streams. A stream runs its kernels one after the other; a kernel's
// CTAs start in order, each when a slot is free, and keep it to their end. Threads of a CPU rank
// are kernels of one CTA that need no slot, and so are stream operations and copy engines. A
// program may have calls on several groups open at once.
//
// Where slots do not run short, one greedy run decides whether there is a deadlock. A step is
// enabled by flags, which only rise, or by nothing. So once a step is enabled it stays enabled,
// whatever others do, until it is executed (the programs are straight lines). Two enabled steps
// therefore commute. Suppose that a run A ends with nothing enabled, and that a run B executes a
// step that A has not executed. Take the first such step of B. All steps before it are in A, and
// with them every raise that enabled it. So it is enabled at the end of A, which is a
// contradiction. All maximal runs therefore execute the same steps; if one gets stuck, all do.
// Slots break the argument, because taking one disables others. There, explore() tries every order,
// and the clamp of max_ctas restores the argument by giving each CTA a slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/symmetric/protocol.h"
#include "model/protocol_program.h"

namespace axonn::comm::testing {

struct Kernel {
  std::vector<Program> ctas;
  bool needs_slot = false;
};
using Stream = std::vector<Kernel>;
struct Device {
  int64_t num_slots;
  std::vector<Stream> streams;
};
// A group has its own flags, workspaces and epochs. A rank may be in several groups, with different
// numbers.
struct Group {
  int64_t size;  // ranks
  Epoch first_epoch;
};
struct World {
  std::vector<Group> groups;
  int64_t num_flags;  // per pad
  std::vector<Device> devices;
  int64_t num_halves = kNumHalves;
};

// One CTA's program, and where it runs.
struct Thread {
  const Program* program;
  size_t device;
  size_t stream;  // numbered through all devices
  size_t kernel;  // in its stream
  size_t index;   // in its stream
  size_t before;  // threads of its stream that belong to earlier kernels
  bool needs_slot;
};

// The state of a run. It is determined by how far each thread has advanced.
class State {
 public:
  State(const World& world, const std::vector<Thread>& threads)
      : world_(&world),
        threads_(&threads),
        at_(threads.size(), kNotStarted),
        reading_(threads.size(), 0),
        started_(threads.back().stream + 1, 0),
        ended_(threads.back().stream + 1, 0),
        held_(world.devices.size(), 0) {
    const auto num_flags = static_cast<size_t>(world.num_flags);
    for (const auto& [size, first_epoch] : world.groups) {
      first_pad_.push_back(completed_.size());
      completed_.resize(completed_.size() + static_cast<size_t>(size), first_epoch);
      flags_.resize(completed_.size() * num_flags, first_epoch);
      sums_.resize(completed_.size() * num_flags, {first_epoch, size});
    }
    chunks_.resize(flags_.size() * static_cast<size_t>(world.num_halves));
  }

  // Returns a key that identifies the state among those of one world.
  std::string key() const {
    std::string key;
    for (size_t thread = 0; thread < at_.size(); ++thread) {
      const auto value = static_cast<uint16_t>(2 * at_[thread] + reading_[thread]);
      key += static_cast<char>(value & 0xFF);
      key += static_cast<char>(value >> 8);
    }
    return key;
  }

  bool finished(size_t thread) const { return at_[thread] == end(thread); }
  bool all_finished() const {
    for (size_t thread = 0; thread < at_.size(); ++thread) {
      if (!finished(thread)) return false;
    }
    return true;
  }
  int64_t progress(size_t thread) const { return at_[thread]; }

  bool enabled(size_t thread) const {
    if (finished(thread)) return false;
    if (at_[thread] == kNotStarted) return may_start(thread);
    const Step& step = current(thread);
    if (step.action == Action::kAwaitCompleted) {
      return epoch_reached(completed_[pad(step, step.peer)], step.epoch);
    }
    if (step.action == Action::kWait) {
      return epoch_reached(flags_[flag_index(step, step.peer)], step.epoch);
    }
    return true;
  }

  // Executes the thread's next move: its start, or one step. A read is two steps, its begin and its
  // end. Returns a description of the violation, if any.
  std::string advance(size_t thread) {
    if (at_[thread] == kNotStarted) {
      start(thread);
      if (finished(thread)) finish(thread);  // a CTA without tiles
      return "";
    }
    const Step& step = current(thread);
    const bool reads = step.action == Action::kRead || step.action == Action::kAdd;
    std::string violation = execute(step, reads && reading_[thread] != 0);
    if (reads) reading_[thread] ^= 1;
    if (reading_[thread] == 0 && ++at_[thread] == end(thread)) finish(thread);
    if (!violation.empty()) violation = step.describe() + ": " + violation;
    return violation;
  }

  std::string stuck() const {
    std::string text = "deadlock:";
    for (size_t thread = 0; thread < at_.size(); ++thread) {
      if (finished(thread)) continue;
      if (at_[thread] == kNotStarted) {
        text += "\n  thread " + std::to_string(thread) + " has not started";
      } else {
        text += "\n  " + current(thread).describe();
      }
    }
    return text;
  }

 private:
  static constexpr int64_t kNotStarted = -1;
  struct Chunk {
    Epoch epoch = 0;
    bool written = false;
    int64_t readers = 0;
  };
  struct Sum {
    Epoch epoch;  // of the latest sum
    int64_t added;
  };

  int64_t end(size_t thread) const {
    return static_cast<int64_t>((*threads_)[thread].program->size());
  }
  const Step& current(size_t thread) const {
    return (*(*threads_)[thread].program)[static_cast<size_t>(at_[thread])];
  }
  int64_t size_of_group(const Step& step) const {
    return world_->groups[static_cast<size_t>(step.group)].size;
  }
  // Returns the pad of a rank of the step's group, numbered through all groups.
  size_t pad(const Step& step, int64_t rank) const {
    return first_pad_[static_cast<size_t>(step.group)] + static_cast<size_t>(rank);
  }
  size_t flag_index(const Step& step, int64_t rank) const {
    return pad(step, rank) * static_cast<size_t>(world_->num_flags) +
           static_cast<size_t>(step.flag);
  }
  // Returns the chunks of the half of a rank's workspace that the step's call uses.
  Chunk* half(const Step& step, int64_t rank) {
    const auto num_halves = static_cast<size_t>(world_->num_halves);
    const size_t index = pad(step, rank) * num_halves + step.epoch % num_halves;
    return &chunks_[index * static_cast<size_t>(world_->num_flags)];
  }

  // Returns whether the stream's kernels before this one have ended, the kernel's CTAs before this
  // one have started, and a slot is free.
  bool may_start(size_t thread) const {
    const Thread& own = (*threads_)[thread];
    return started_[own.stream] == own.index && ended_[own.stream] >= own.before &&
           (!own.needs_slot || held_[own.device] < world_->devices[own.device].num_slots);
  }
  void start(size_t thread) {
    const Thread& own = (*threads_)[thread];
    at_[thread] = 0;
    ++started_[own.stream];
    held_[own.device] += own.needs_slot;
  }
  void finish(size_t thread) {
    const Thread& own = (*threads_)[thread];
    ++ended_[own.stream];
    held_[own.device] -= own.needs_slot;
  }

  std::string execute(const Step& step, bool ends_read) {
    switch (step.action) {
      case Action::kAwaitCompleted:
      case Action::kWait:
        return "";
      case Action::kSignal:
        return raise(flags_[flag_index(step, step.rank)], step.epoch);
      case Action::kComplete:
        return complete(step);
      case Action::kWrite:
        return write(step);
      case Action::kRead:
      case Action::kAdd: {
        Chunk& source = half(step, step.peer)[step.flag];
        source.readers += ends_read ? -1 : 1;
        if (!source.written || source.epoch != step.epoch) {
          return "finds epoch " + std::to_string(source.epoch);
        }
        return step.action == Action::kAdd && !ends_read ? add(step) : "";
      }
    }
    return "unknown step";
  }

  // Calls differ in where their chunks lie, so a write may hit any chunk of another call.
  std::string write(const Step& step) {
    Chunk* const chunks = half(step, step.rank);
    Chunk& target = chunks[step.flag];
    if (target.written && target.epoch == step.epoch) return "written twice";
    for (int64_t flag = 0; flag < world_->num_flags; ++flag) {
      Chunk& other = chunks[flag];
      if (other.written && other.epoch == step.epoch) continue;
      if (other.readers > 0) return "overwrites what is being read";
      other.written = false;
    }
    target = {step.epoch, true, 0};
    return "";
  }

  // Flags only rise.
  static std::string raise(Epoch& flag, Epoch epoch) {
    const bool rises = !epoch_reached(flag, epoch);
    flag = epoch;
    return rises ? "" : "the flag does not rise";
  }

  // Each sum has one addend per rank, in rank order, and is made once per call.
  std::string add(const Step& step) {
    Sum& sum = sums_[flag_index(step, step.rank)];
    if (sum.epoch != step.epoch) {
      if (sum.added != size_of_group(step)) return "the sum before is unfinished";
      sum = {step.epoch, 0};
    }
    return sum.added++ == step.peer ? "" : "out of order";
  }

  std::string complete(const Step& step) {
    const auto num_flags = static_cast<size_t>(world_->num_flags);
    const Sum* const sums = &sums_[pad(step, step.rank) * num_flags];
    const bool made = std::all_of(sums, sums + num_flags,
                                  [&](const Sum& sum) { return sum.added == size_of_group(step); });
    return made ? raise(completed_[pad(step, step.rank)], step.epoch) : "a sum is unfinished";
  }

  const World* world_;
  const std::vector<Thread>* threads_;
  std::vector<int64_t> at_;      // by thread: the next step
  std::vector<char> reading_;    // by thread: whether it is within a read
  std::vector<size_t> started_;  // by stream
  std::vector<size_t> ended_;
  std::vector<int64_t> held_;      // slots, by device
  std::vector<size_t> first_pad_;  // by group
  std::vector<Epoch> completed_;   // by pad
  std::vector<Epoch> flags_;
  std::vector<Chunk> chunks_;
  std::vector<Sum> sums_;
};

inline std::vector<Thread> threads_of(const World& world) {
  std::vector<Thread> threads;
  size_t stream = 0;
  for (size_t device = 0; device < world.devices.size(); ++device) {
    for (const Stream& kernels : world.devices[device].streams) {
      size_t index = 0;
      for (size_t kernel = 0; kernel < kernels.size(); ++kernel) {
        const size_t before = index;
        for (const Program& program : kernels[kernel].ctas) {
          threads.push_back(
              {&program, device, stream, kernel, index++, before, kernels[kernel].needs_slot});
        }
      }
      ++stream;
    }
  }
  return threads;
}

// Picks one of the threads that can go on.
using Scheduler = std::function<size_t(const State&, const std::vector<size_t>& enabled)>;

inline std::vector<size_t> enabled_threads(const State& state, size_t count) {
  std::vector<size_t> enabled;
  for (size_t thread = 0; thread < count; ++thread) {
    if (state.enabled(thread)) enabled.push_back(thread);
  }
  return enabled;
}

// Runs one interleaving. Returns the first violation, or where it got stuck; an empty string if all
// is well.
inline std::string run(const World& world, const Scheduler& pick) {
  const auto threads = threads_of(world);
  State state(world, threads);
  while (!state.all_finished()) {
    const auto enabled = enabled_threads(state, threads.size());
    if (enabled.empty()) return state.stuck();
    if (auto violation = state.advance(pick(state, enabled)); !violation.empty()) return violation;
  }
  return "";
}

struct Exploration {
  std::string violation;  // of the first bad interleaving; empty: there is none
  int64_t num_states = 0;
  bool exhaustive = true;  // false: stopped at max_states
};

// Runs all interleavings.
inline Exploration explore(const World& world, int64_t max_states) {
  Exploration result;
  const auto threads = threads_of(world);
  std::vector<State> open{State(world, threads)};
  std::unordered_set<std::string> seen{open.back().key()};
  while (!open.empty()) {
    const State state = std::move(open.back());
    open.pop_back();
    if (++result.num_states > max_states) {
      result.exhaustive = false;
      return result;
    }
    const auto enabled = enabled_threads(state, threads.size());
    if (enabled.empty() && !state.all_finished()) {
      result.violation = state.stuck();
      return result;
    }
    for (const size_t thread : enabled) {
      State next = state;
      result.violation = next.advance(thread);
      if (!result.violation.empty()) return result;
      if (seen.insert(next.key()).second) open.push_back(std::move(next));
    }
  }
  return result;
}

}  // namespace axonn::comm::testing
