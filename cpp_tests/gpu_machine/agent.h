// An agent reads and writes memory: a warp, an asynchronous operation or a copy engine. It knows
// what is ordered before its next access, and finds earlier accesses that race with that one or
// that took another proxy without a fence in between.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu_machine/clock.h"
#include "gpu_machine/errors.h"
#include "gpu_machine/memory.h"
#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

class Machine;

struct Access {
  Order order = Order::kWeak;
  Scope scope = Scope::kNone;
  uint8_t alias = 0;  // which of the addresses of these bytes
};

class Agent {
 public:
  // The agent's time begins at `time`, since one actor may stand for several agents in succession.
  Agent(Machine& of_machine, const Actor& who, const Clock& before, Proxy by = Proxy::kGeneric,
        uint32_t time = 1)
      : machine(of_machine), actor(who), clock(before), proxy(by), time_(time) {}
  virtual ~Agent() = default;

  // Each checks an access of `bytes` bytes and records it. Bytes that are read must be written.
  void note_read(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void note_write(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void note_update(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void fence(Scope scope);
  void fence_proxy(ProxyFence fence);
  // Learns what a read of this order found released: at once, or at the next fence. If `lane` (not
  // -1) did the read, the other lanes of its warp learn it when they meet that lane.
  void learn(const Clock& released, Order order, int lane = -1);
  // These lanes of a warp have met: each has now seen all that the others did and learned.
  void meet_lanes(uint32_t lanes);
  // Returns what others know once they learn of everything that this agent, or this lane of it, has
  // done so far. A lane's snapshot covers what the other lanes did, but not what they learned.
  Clock snapshot(int lane = -1);
  // The part of a snapshot that a relaxed operation of this scope passes on: what a fence released.
  Clock released_by_fence(Scope scope) const;
  // The lanes whose writes to host memory may not have arrived yet, because no fence of the whole
  // system has followed them.
  uint32_t lanes_that_owe_host() const { return owe_host_; }
  // This lane's update changed nothing, so the lane owes only what it owed before.
  void forget_host_write(int lane, uint32_t owed_before) {
    owe_host_ = (owe_host_ & ~(1u << lane)) | (owed_before & 1u << lane);
  }
  // The agent's logical time. Snapshots taken from now on cover it; earlier ones do not.
  uint32_t time() const { return time_; }

  [[noreturn]] virtual void fail(MachineError::Kind kind, const std::string& what,
                                 int lane) const = 0;

  Machine& machine;
  const Actor actor;
  Clock clock;
  const Proxy proxy;

 private:
  enum class Pair : uint8_t { kReadAfterWrite, kWriteAfterWrite, kWriteAfterRead };
  bool is_ordered(const Mark& mark, int lane) const;
  // What is missing between a write and this access. If the two are ordered, only a fence can be
  // missing.
  enum class Lacks : uint8_t { kNothing, kOrder, kProxyFence, kAliasFence };
  Lacks fence_that_lacks(const Mark& mark, Access access, const Region& region, int lane) const;
  void check_race(const Mark& mark, Access access, const Region& region, uint64_t offset, int lane,
                  Pair accesses) const;
  void fail_race(const Mark& mark, const Region& region, uint64_t offset, int lane, Pair accesses,
                 Lacks lacks) const;
  void mark_reads(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void mark_writes(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void check_not_reserved(const Region& region, uint64_t offset, uint32_t bytes, int lane) const;
  void check_written(const Region& region, uint64_t offset, uint32_t bytes, int lane) const;
  void acquire(Region& region, uint64_t offset, Access access, int lane);
  void release(Region& region, uint64_t offset, Access access, bool is_update, int lane);
  Mark own_mark(Access access, int lane) const;
  const Clock* learned_by(int lane) const;

  uint32_t time_;      // logical time; advances whenever others may learn of this agent
  Clock pending_;      // what relaxed reads found, until a fence makes them acquires
  Clock fence_clock_;  // what relaxed writes release since the last fence
  Scope fence_scope_ = Scope::kNone;
  // For a warp: the time up to which each lane has seen the other lanes' accesses, and what lanes
  // have learned since they last met.
  std::array<uint32_t, 32> others_seen_{};
  std::vector<std::pair<int, Clock>> learned_;
  void note_host_write(const Region& region, Access access, int lane);
  uint32_t owe_host_ = 0;    // mask of lanes
  uint32_t init_fence_ = 0;  // the time of the last fence.mbarrier_init; 0 if there was none
};

}  // namespace axonn::gpu_machine
