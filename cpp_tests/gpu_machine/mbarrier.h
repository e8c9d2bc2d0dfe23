// mbarrier objects: barriers in shared memory whose phases end when all arrivals have come and all
// bytes that were expected have been written. Source: PTX ISA 9.0, section 9.7.13.15.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_machine/agent.h"

namespace axonn::gpu_machine {

inline constexpr uint32_t kMBarrierBytes = 8;
inline constexpr int64_t kMostMBarrierCount = (1 << 20) - 1;  // arrivals, and bytes

class MBarrier {
 public:
  // `init` is whoever initialized it, for the order of what comes after that.
  MBarrier(Agent& init, uint32_t count);

  // Each of these fails through `who` where the barrier is misused. What `released` holds is known
  // to those who wait for the end of the phase.
  void arrive(const Agent& who, uint32_t count, bool drops, const Clock& released, int lane);
  // The phase ends one arrival later.
  void await_one_more(const Agent& who, int lane);
  void expect(const Agent& who, int64_t bytes, int lane);
  void complete(const Agent& who, int64_t bytes, const Clock& released);
  // Nobody may use it before it has seen the initialization.
  void check_initialized(const Agent& who, bool is_remote, int lane) const;

  uint64_t phase() const { return phase_; }  // how many have ended
  uint32_t pending() const { return pending_; }
  // What those learn who see that a phase has ended: from their own CTA and from operations that
  // signal bytes; and, if the scope of the wait reaches so far, from arrivals of other CTAs.
  const Clock& complete_clock() const { return complete_; }
  const Clock& complete_clock_of_others() const { return complete_of_others_; }
  // Arrivals of other CTAs, the last of each: the CTA must not leave before it has seen them.
  struct Arrival {
    uint32_t actor, time;
  };
  const std::vector<Arrival>& remote_arrivals() const { return remote_arrivals_; }
  void note_remote_arrival(uint32_t actor, uint32_t time);
  std::string describe() const;

 private:
  void end_phase_if_complete();

  uint32_t expected_ = 0, pending_ = 0;  // arrivals of each phase, and those that this one lacks
  int64_t bytes_ = 0;                    // that this phase lacks; below zero if they came early
  uint64_t phase_ = 0;
  Clock arriving_, complete_;
  Clock arriving_of_others_, complete_of_others_;
  uint32_t init_actor_, init_time_;
  int64_t cta_;  // whose it is
  std::vector<Arrival> remote_arrivals_;
};

}  // namespace axonn::gpu_machine
