// Whoever reads and writes memory: a warp or a copy engine. It knows what is ordered before its
// next access, and finds accesses that race with that.
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
};

class Agent {
 public:
  Agent(Machine& of_machine, const Actor& who, const Clock& before)
      : machine(of_machine), actor(who), clock(before) {}
  virtual ~Agent() = default;

  // Each checks an access of `bytes` bytes and notes it. A read finds the bytes written.
  void note_read(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void note_write(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void note_update(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void fence(Scope scope);
  // What others know who learn of all that this agent has done until now.
  Clock snapshot();

  [[noreturn]] virtual void fail(MachineError::Kind kind, const std::string& what,
                                 int lane) const = 0;

  Machine& machine;
  const Actor actor;
  Clock clock;

 private:
  bool is_ordered(const Mark& mark) const;
  void check_race(const Mark& mark, Access access, const Region& region, uint64_t offset, int lane,
                  const char* accesses) const;
  void mark_reads(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void mark_writes(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane);
  void check_written(const Region& region, uint64_t offset, uint32_t bytes, int lane) const;
  void acquire(Region& region, uint64_t offset, Access access);
  void release(Region& region, uint64_t offset, Access access, bool is_update);
  Mark own_mark(Access access) const;

  uint32_t time_ = 1;  // counts what others may learn of this agent
  Clock pending_;      // of relaxed reads, until a fence makes them acquires
  Clock fence_clock_;  // what relaxed writes release since a fence
  Scope fence_scope_ = Scope::kNone;
};

}  // namespace axonn::gpu_machine
