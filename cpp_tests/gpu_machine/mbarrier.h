// mbarrier objects: barriers in shared memory whose phases end when all arrivals and all expected
// bytes have come. Source: PTX ISA 9.0, section 9.7.13.15.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_machine/agent.h"

namespace axonn::gpu_machine {

inline constexpr uint32_t kMBarrierBytes = 8;
inline constexpr int64_t kMostMBarrierCount = (1 << 20) - 1;  // limit for arrivals and for bytes

class MBarrier {
 public:
  // `init` is the agent that initializes it; later uses must be ordered after that.
  MBarrier(Agent& init, uint32_t count);

  // Each of these fails through `who` if the barrier is misused. Agents that wait for the end of
  // the phase learn what `released` holds.
  void arrive(const Agent& who, uint32_t count, bool drops, const Clock& released, int lane);
  // Makes the phase wait for one more arrival.
  void await_one_more(const Agent& who, int lane);
  void expect(const Agent& who, int64_t bytes, int lane);
  void complete(const Agent& who, int64_t bytes, const Clock& released);
  // An agent must have seen the initialization before it uses the barrier.
  void check_initialized(const Agent& who, bool is_remote, int lane) const;

  uint64_t phase() const { return phase_; }  // number of phases that have ended
  uint32_t pending() const { return pending_; }
  // What an agent learns when it sees that a phase has ended: from its own CTA and from operations
  // that signal bytes; and from arrivals of other CTAs, if the scope of its wait reaches that far.
  const Clock& complete_clock() const { return complete_; }
  const Clock& complete_clock_of_others() const { return complete_of_others_; }
  // The last arrival of each agent of another CTA. The CTA must not leave before it has seen them.
  struct Arrival {
    uint32_t actor, time;
  };
  const std::vector<Arrival>& remote_arrivals() const { return remote_arrivals_; }
  void note_remote_arrival(uint32_t actor, uint32_t time);
  std::string describe() const;

 private:
  void end_phase_if_complete();

  uint32_t expected_ = 0, pending_ = 0;  // arrivals per phase, and those this one still lacks
  int64_t bytes_ = 0;                    // that this phase still lacks; negative if they came early
  uint64_t phase_ = 0;
  Clock arriving_, complete_;
  Clock arriving_of_others_, complete_of_others_;
  uint32_t init_actor_, init_time_;
  int64_t cta_;  // the CTA it belongs to
  std::vector<Arrival> remote_arrivals_;
};

}  // namespace axonn::gpu_machine
