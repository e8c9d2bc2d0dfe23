// The groups of cp.async, which each lane commits and waits for separately. The lanes of a warp
// usually do so together, so one operation stands for the copies they begin together.
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
  static constexpr uint32_t kAll = 0xFFFFFFFFu;  // includes copies not yet committed

  void add(const Operation& operation, uint32_t mask);
  void commit(uint32_t mask);
  // Whether all but the last `most` groups of each of these lanes have ended; kAll means all.
  bool have_ended(uint32_t mask, uint32_t most) const;
  // Lets the agent learn of those groups.
  void learn(Agent& who, uint32_t mask, uint32_t most);
  // Returns the copies of these lanes that have not ended.
  std::vector<Operation> under_way(uint32_t mask) const;
  const Clock& ended() const { return ended_; }
  // Keeps only the clocks of ended copies. Otherwise a kernel that waits by mbarriers, and never
  // for groups, would make the entries grow without end.
  void forget_ended();

 private:
  struct Entry {
    Operation operation;                   // null if it has ended; then `seen` is its clock
    uint32_t mask;                         // lanes that have not waited for it yet
    std::array<uint32_t, kLanes> group{};  // index of the group, by lane
    Clock seen{};

    bool has_ended() const {
      return operation == nullptr || operation->stage() == AsyncStage::kDone;
    }
    const Clock& clock() const {
      return operation == nullptr ? seen : operation->seen_at(AsyncStage::kDone);
    }
  };
  // Returns the lanes that wait for a group with this entry.
  uint32_t waiting(const Entry& entry, uint32_t mask, uint32_t most) const;

  std::vector<Entry> entries_;
  Clock ended_;                               // of ended copies, waited for or forgotten
  std::array<uint32_t, kLanes> committed_{};  // number of groups, by lane
};

}  // namespace axonn::gpu_machine
