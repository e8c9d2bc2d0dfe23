// The groups of cp.async, which each lane commits and waits for by itself. The lanes of a warp do
// so together as a rule, so one operation stands for what they begin together.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_machine/async.h"

namespace axonn::gpu_machine {

class CopyGroups {
 public:
  using Operation = std::shared_ptr<const AsyncOperation>;
  static constexpr uint32_t kAll = 0xFFFFFFFFu;  // also what is not committed yet

  void add(const Operation& operation, uint32_t mask);
  void commit(uint32_t mask);
  // Whether all groups of these lanes but the last `most` of each have ended, or kAll.
  bool have_ended(uint32_t mask, uint32_t most) const;
  // Lets the agent learn of those.
  void learn(Agent& who, uint32_t mask, uint32_t most);
  // The copies of these lanes that are yet to end, and what the warp's others have done.
  std::vector<Operation> under_way(uint32_t mask) const;
  const Clock& ended() const { return ended_; }
  // What has ended is remembered by its clock alone: of a kernel that waits by mbarriers, and never
  // for groups, the entries would grow without end.
  void forget_ended();

 private:
  struct Entry {
    Operation operation;                   // null if it has ended; then `seen` is what is known
    uint32_t mask;                         // lanes that have not waited for it yet
    std::array<uint32_t, kLanes> group{};  // of each lane
    Clock seen{};

    bool has_ended() const {
      return operation == nullptr || operation->stage() == AsyncStage::kDone;
    }
    const Clock& clock() const {
      return operation == nullptr ? seen : operation->seen_at(AsyncStage::kDone);
    }
  };
  // The lanes for which the entry is in a group that they wait for.
  uint32_t waiting(const Entry& entry, uint32_t mask, uint32_t most) const;

  std::vector<Entry> entries_;
  Clock ended_;                               // what copies have done that someone has asked about
  std::array<uint32_t, kLanes> committed_{};  // groups of each lane
};

}  // namespace axonn::gpu_machine
