#include "gpu_machine/mbarrier.h"

#include <algorithm>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {

MBarrier::MBarrier(Agent& init, uint32_t count)
    : expected_(count),
      pending_(count),
      init_actor_(init.actor.id),
      init_time_(init.time()),
      cta_(init.actor.cta) {}

void MBarrier::check_initialized(const Agent& who, bool is_remote, int lane) const {
  if (who.actor.id == init_actor_) return;
  const uint32_t launch = who.machine.actor(init_actor_).launch;
  const auto fenced = [&](ProxyFence fence) {
    return who.clock.has_seen_fenced(init_actor_, launch, init_time_, fence);
  };
  const bool seen = who.clock.has_seen(init_actor_, launch, init_time_);
  const bool by_fence = fenced(ProxyFence::kBarrierInit);
  if (who.proxy == Proxy::kAsync) {
    if (by_fence || fenced(ProxyFence::kAsyncShared)) return;
    who.fail(MachineError::Kind::kRace,
             "race: no fence.mbarrier_init or fence.proxy.async orders this signal after the "
             "initialization of the mbarrier",
             lane);
  }
  if (seen || by_fence) return;
  who.fail(MachineError::Kind::kRace,
           std::string("race: nothing orders this use of an mbarrier") +
               (is_remote ? " of another CTA" : "") + " after its initialization",
           lane);
}

void MBarrier::arrive(const Agent& who, uint32_t count, bool drops, const Clock& released,
                      int lane) {
  if (count == 0 || count > pending_) {
    who.fail(MachineError::Kind::kUndefined,
             "arrives " + std::to_string(count) + " times at an mbarrier whose phase lacks " +
                 std::to_string(pending_) + " of " + std::to_string(expected_) + " arrivals",
             lane);
  }
  pending_ -= count;
  if (drops) expected_ -= count;
  (who.actor.cta == cta_ ? arriving_ : arriving_of_others_).join(released);
  end_phase_if_complete();
}

void MBarrier::await_one_more(const Agent& who, int lane) {
  if (pending_ == kMostMBarrierCount) {
    who.fail(MachineError::Kind::kUndefined, "an mbarrier counts at most 1048575 arrivals", lane);
  }
  ++pending_;
}

void MBarrier::expect(const Agent& who, int64_t bytes, int lane) {
  bytes_ += bytes;
  if (bytes_ > kMostMBarrierCount) {
    who.fail(MachineError::Kind::kUndefined,
             "an mbarrier can expect " + std::to_string(kMostMBarrierCount) + " bytes, not " +
                 std::to_string(bytes_),
             lane);
  }
  end_phase_if_complete();
}

void MBarrier::complete(const Agent& who, int64_t bytes, const Clock& released) {
  bytes_ -= bytes;
  if (bytes_ < -kMostMBarrierCount) {
    who.fail(MachineError::Kind::kUndefined,
             "an mbarrier has got " + std::to_string(-bytes_) + " bytes more than it expected", -1);
  }
  arriving_.join(released);
  end_phase_if_complete();
}

void MBarrier::end_phase_if_complete() {
  if (pending_ != 0 || bytes_ != 0) return;
  ++phase_;
  pending_ = expected_;
  complete_ = arriving_;
  complete_of_others_ = arriving_of_others_;
}

void MBarrier::note_remote_arrival(uint32_t actor, uint32_t time) {
  for (Arrival& arrival : remote_arrivals_) {
    if (arrival.actor != actor) continue;
    arrival.time = std::max(arrival.time, time);
    return;
  }
  remote_arrivals_.push_back({actor, time});
}

std::string MBarrier::describe() const {
  return "phase " + std::to_string(phase_) + " lacks " + std::to_string(pending_) + " of " +
         std::to_string(expected_) + " arrivals and " + std::to_string(bytes_) + " bytes";
}

}  // namespace axonn::gpu_machine
