// Whoever reads and writes memory: a warp, an asynchronous operation or a copy engine. It knows
// what is ordered before its next access, and finds accesses that race with that, or that come by
// another proxy without a fence.
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
  uint8_t alias = 0;  // by which address of the bytes
};

class Agent {
 public:
  // Its time begins at `time`, since one actor may stand for several agents, one after the other.
  Agent(Machine& of_machine, const Actor& who, const Clock& before, Proxy by = Proxy::kGeneric,
        uint32_t time = 1)
      : machine(of_machine), actor(who), clock(before), proxy(by), time_(time) {}
  virtual ~Agent() = default;

  // Each checks an access of `bytes` bytes and notes it. A read finds the bytes written.
  void note_read(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void note_write(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void note_update(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void fence(Scope scope);
  void fence_proxy(ProxyFence fence);
  // A read of this order found what was released: at once, or with the next fence. If it was one
  // lane's (not -1), the others of its warp know it when they meet it.
  void learn(const Clock& released, Order order, int lane = -1);
  // These lanes of a warp have met: each has seen what all did and learned before.
  void meet_lanes(uint32_t lanes);
  // What others know who learn of all that this agent, or this lane of it, has done until now. Of
  // a lane, what the others did counts as seen; what they learned does not.
  Clock snapshot(int lane = -1);
  // The part of it that a relaxed operation of this scope passes on: what a fence has released.
  Clock released_by_fence(Scope scope) const;
  // The lanes whose writes of the host's memory may not have come there yet, because no fence of
  // the whole system lies behind them.
  uint32_t lanes_that_owe_host() const { return owe_host_; }
  // An update by this lane has changed nothing, so it owes only what it owed before.
  void forget_host_write(int lane, uint32_t owed_before) {
    owe_host_ = (owe_host_ & ~(1u << lane)) | (owed_before & 1u << lane);
  }
  // What others may learn of this agent from now on is later than this.
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
  // What is missing on the way from a write to this access; of one that is ordered, at most a
  // fence.
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

  uint32_t time_;      // counts what others may learn of this agent
  Clock pending_;      // of relaxed reads, until a fence makes them acquires
  Clock fence_clock_;  // what relaxed writes release since a fence
  Scope fence_scope_ = Scope::kNone;
  // Of a warp: up to which time each lane has seen what the others did, and what lanes have learned
  // since they met.
  std::array<uint32_t, 32> others_seen_{};
  std::vector<std::pair<int, Clock>> learned_;
  void note_host_write(const Region& region, Access access, int lane);
  uint32_t owe_host_ = 0;    // lanes
  uint32_t init_fence_ = 0;  // the time of the last fence.mbarrier_init; 0 if there was none
};

}  // namespace axonn::gpu_machine
