// Operations that an instruction starts and that run later: TMA copies, bulk copies, wgmma
// products, arrivals at another CTA. Each is an agent with its own clock, so its accesses race with
// those of any warp, even the one that issued it, unless something orders them.
//
// The life of an operation, and who does what:
// - An instruction creates one (a class derived from AsyncOperation) and hands it to
//   `machine.async().begin(...)`. Its clock then holds what the warp has seen so far.
// - The adversary calls step() whenever it likes, until the operation has reached kDone. In step()
//   an operation records its accesses (note_read and the like) and does one part of its work. After
//   the last read of its sources it calls reach(kRead), and at its end reach(kDone).
// - An operation with `behind` set does not begin until that one is done (wgmma).
// - Those that wait for it learn `seen_at(stage)`: groups (AsyncGroups), which a thread commits and
//   waits for, and mbarriers, to which an operation passes what it has done (MBarrier::complete).
// - An instruction that waits sets `Op::ready`, with Flow::kWait or kMeetAll: its lanes go on when
//   that returns true, and `execute` then lets the warp learn what the operations did.
// - Sources and targets in shared memory must outlive it: uses() tells which CTAs' memory it still
//   needs. It is an error for such a CTA to leave.
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

// An actor that stands for consecutive operations; concurrent operations have different identities.
// This keeps clocks from growing with the number of operations.
struct Identity {
  uint32_t actor = 0;
  uint32_t time = 1;
  bool is_busy = false;
};

// The identities of a launch. Operations share one only if anyone who has seen the later one has
// also seen the earlier one: those that complete at one mbarrier, or in groups of one thread.
class Identities {
 public:
  using Key = std::pair<uint64_t, uint64_t>;
  // Returns a free identity, or a new one.
  Identity& lease(const Warp& issuer, Key key);

 private:
  std::map<Key, std::deque<Identity>> free_and_busy_;
};

class AsyncOperation : public Agent {
 public:
  using Stage = AsyncStage;

  // Started by this lane of the warp (-1: the whole warp), at its current instruction. `key` tells
  // which operations are ordered with it; see Identities.
  AsyncOperation(Warp& issuer, int lane, Proxy by, Identities::Key key);

  // Does the next part of the work.
  virtual void step() = 0;
  // Whether it will still access shared memory of this CTA, or arrive there.
  virtual bool uses(const Cta& cta) const = 0;
  // Whether the adversary may delay it until after the end of its CTA.
  virtual bool may_outlast_its_cta() const { return false; }

  Stage stage() const { return stage_; }
  // Clock of the agents that have waited for this stage. The stage must have been reached.
  const Clock& seen_at(Stage stage) const {
    return stage == Stage::kRead ? seen_at_read_ : seen_at_end_;
  }
  const Launch& launch() const { return origin_.launch; }
  [[noreturn]] void fail(MachineError::Kind kind, const std::string& what,
                         int lane = -1) const override;
  std::string describe() const { return origin_.describe(); }

  std::shared_ptr<const AsyncOperation> behind;  // may be null
  uint64_t due_ns = 0;                           // does not step before this time

 protected:
  void reach(Stage stage);

 private:
  AsyncOperation(Warp& issuer, int lane, Proxy by, Identity& identity);

  const Origin origin_;
  Identity& identity_;
  Stage stage_ = Stage::kBegun;
  Clock seen_at_read_, seen_at_end_;
};

// All pending operations of a machine.
class AsyncQueue {
 public:
  explicit AsyncQueue(Machine& machine) : machine_(machine) {}

  void begin(const std::shared_ptr<AsyncOperation>& operation);
  // Steps some of the operations that are due. Returns whether any stepped.
  bool step();
  // Steps the operation that is due first. Returns false if there is none.
  bool step_first();
  // The time at which the first of them is due; the largest number if there is none.
  uint64_t first_due_ns() const;
  // Returns an operation that still needs the CTA's memory, or null.
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
