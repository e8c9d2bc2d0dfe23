// Whoever reads and writes memory: a warp, an asynchronous operation or a copy engine. It knows
// what is ordered before its next access, and finds accesses that race with that, or that come by
// another proxy without a fence.
#pragma once

#include <cstdint>
#include <string>

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
  // A read of this order found what was released: at once, or with the next fence.
  void learn(const Clock& released, Order order);
  // What others know who learn of all that this agent has done until now.
  Clock snapshot();
  // The part of it that a relaxed operation of this scope passes on: what a fence has released.
  Clock released_by_fence(Scope scope) const;
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
  bool is_ordered(const Mark& mark) const;
  // What is missing on the way from a write to this access; of one that is ordered, at most a
  // fence.
  enum class Lacks : uint8_t { kNothing, kOrder, kProxyFence, kAliasFence };
  Lacks fence_that_lacks(const Mark& mark, Access access, const Region& region) const;
  void check_race(const Mark& mark, Access access, const Region& region, uint64_t offset, int lane,
                  Pair accesses) const;
  void fail_race(const Mark& mark, const Region& region, uint64_t offset, int lane, Pair accesses,
                 Lacks lacks) const;
  void mark_reads(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void mark_writes(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void check_not_reserved(const Region& region, uint64_t offset, uint32_t bytes, int lane) const;
  void check_written(const Region& region, uint64_t offset, uint32_t bytes, int lane) const;
  void acquire(Region& region, uint64_t offset, Access access);
  void release(Region& region, uint64_t offset, Access access, bool is_update);
  Mark own_mark(Access access) const;

  uint32_t time_;      // counts what others may learn of this agent
  Clock pending_;      // of relaxed reads, until a fence makes them acquires
  Clock fence_clock_;  // what relaxed writes release since a fence
  Scope fence_scope_ = Scope::kNone;
  uint32_t init_fence_ = 0;  // the time of the last fence.mbarrier_init; 0 if there was none
};

}  // namespace axonn::gpu_machine
