// Operations that an instruction begins and that take place later: copies of TMA, bulk copies,
// products of wgmma, arrivals at another CTA. Each is an agent with a clock of its own, so that its
// accesses race with those of the warps, its own included, which nothing orders with it.
//
// The life of an operation, and who does what:
// - An instruction makes one (a class derived from AsyncOperation) and hands it to
//   `machine.async().begin(...)`. Its clock is then what the warp has seen until that moment.
// - The adversary calls step() at moments of its choice, until the operation has reached kDone. In
//   step() an operation notes its accesses (note_read and its like) and does one piece of its work.
//   When it will read no more of its sources it calls reach(kRead), and at its end reach(kDone).
// - An operation whose `behind` is set does not begin before that one is done (wgmma).
// - Who waits for it learns `seen_at(stage)`: groups (AsyncGroups) that a thread commits and waits
//   for, and mbarriers, to which an operation passes what it has done (MBarrier::complete).
// - An instruction that waits sets `Op::ready`, with Flow::kWait or kMeetAll: the lanes go on when
//   it returns true, and `execute` then lets the warp learn what the operations did.
// - Sources and targets in shared memory must outlive it: uses() tells of which CTAs it still needs
//   memory. A CTA that leaves too early is an error.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu_machine/agent.h"
#include "gpu_machine/async_groups.h"
#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {

// An actor that stands for operations which come one after the other. Those that are under way at
// the same time have different ones. So clocks do not grow with the number of operations.
struct Identity {
  uint32_t actor = 0;
  uint32_t time = 1;
  bool is_busy = false;
};

// The identities of a launch. Operations share one only if whoever has seen the later of them has
// seen the earlier one: those that complete at the same mbarrier, or in groups of the same thread.
class Identities {
 public:
  using Key = std::pair<uint64_t, uint64_t>;
  // Returns one that is free, or a new one.
  Identity& lease(const Warp& issuer, Key key);

 private:
  std::map<Key, std::deque<Identity>> free_and_busy_;
};

class AsyncOperation : public Agent {
 public:
  using Stage = AsyncStage;

  // Begun by this lane of the warp (-1: by all of it), at its current instruction. `key` says which
  // operations are ordered with it, see Identities.
  AsyncOperation(Warp& issuer, int lane, Proxy by, Identities::Key key);

  // Does the next piece of the work.
  virtual void step() = 0;
  // Whether it will still read or write shared memory of this CTA, or arrive there.
  virtual bool uses(const Cta& cta) const = 0;
  // Whether some stay back until their CTA may have ended.
  virtual bool may_outlast_its_cta() const { return false; }

  Stage stage() const { return stage_; }
  // What is known to whoever has waited for this stage, which must have been reached.
  const Clock& seen_at(Stage stage) const {
    return stage == Stage::kRead ? seen_at_read_ : seen_at_end_;
  }
  const Launch& launch() const { return origin_.launch; }
  [[noreturn]] void fail(MachineError::Kind kind, const std::string& what,
                         int lane = -1) const override;
  std::string describe() const { return origin_.describe(); }

  std::shared_ptr<const AsyncOperation> behind;  // may be null
  uint64_t due_ns = 0;                           // not before

 protected:
  void reach(Stage stage);

 private:
  AsyncOperation(Warp& issuer, int lane, Proxy by, Identity& identity);

  const Origin origin_;
  Identity& identity_;
  Stage stage_ = Stage::kBegun;
  Clock seen_at_read_, seen_at_end_;
};

// All operations of a machine that are under way.
class AsyncQueue {
 public:
  explicit AsyncQueue(Machine& machine) : machine_(machine) {}

  void begin(const std::shared_ptr<AsyncOperation>& operation);
  // Some of those that are due make a step. Returns whether one did.
  bool step();
  // The one that is due first makes a step. Returns false if there is none.
  bool step_first();
  // When the first of them is due; the largest number if there is none.
  uint64_t first_due_ns() const;
  // An operation that still needs the CTA's memory, or null.
  const AsyncOperation* user_of(const Cta& cta) const;
  bool has_any_of(const Launch& launch) const;

 private:
  using Pending = std::vector<std::shared_ptr<AsyncOperation>>;
  static bool may_begin(const AsyncOperation& operation) {
    return operation.behind == nullptr || operation.behind->stage() == AsyncOperation::Stage::kDone;
  }
  void step_one(size_t index);
  uint64_t draw_delay(const AsyncOperation& operation);

  Machine& machine_;
  Pending pending_;
};

}  // namespace axonn::gpu_machine
