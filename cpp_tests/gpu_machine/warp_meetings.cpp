// Where the lanes of a warp and the warps of a CTA wait for each other.
#include <algorithm>
#include <bit>

#include "gpu_machine/machine.h"
#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {

bool Warp::meets(Fragment& fragment, const Op& op) {
  const uint32_t live = live_lanes();
  uint32_t members = live;
  if (op.flow == Flow::kMeet) {
    const uint32_t* named = lanes<uint32_t>(op.members);
    members = named[std::countr_zero(fragment.mask)] & live;
    for (uint32_t rest = fragment.mask; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      if ((named[lane] & live) != members || (members >> lane & 1u) == 0) {
        fail(MachineError::Kind::kUndefined, "its membermask does not name the lanes that run it",
             lane);
      }
    }
  } else if (op.flow == Flow::kBarrier && op.choice == 0) {
    return true;  // a barrier at which threads arrive individually
  }
  if (fragment.mask == members) return true;
  fragment.state = Fragment::State::kAtMeeting;
  return op.meets_anywhere && meets_elsewhere(op, members);
}

// Lanes meet at any bar.warp.sync with the same members; all fragments there continue.
bool Warp::meets_elsewhere(const Op& op, uint32_t members) {
  uint32_t there = 0;
  const auto is_at_one = [&](const Fragment& fragment) {
    if (fragment.state != Fragment::State::kAtMeeting) return false;
    const Op& other = launch.program->ops[fragment.pc];
    return other.execute == op.execute && (fragment.mask & ~members) == 0;
  };
  for (const Fragment& fragment : fragments_) {
    if (is_at_one(fragment)) there |= fragment.mask;
  }
  if (there != members) return false;
  meet_lanes(members);
  for (Fragment& fragment : fragments_) {
    if (!is_at_one(fragment)) continue;
    fragment.state = Fragment::State::kReady;
    ++fragment.pc;
  }
  return false;  // the instruction is already done
}

void Warp::arrive(Fragment& fragment, const Op& op) {
  const int lane = std::countr_zero(fragment.mask);
  const uint32_t id = lanes<uint32_t>(op.a)[lane];
  if (id >= cta.barriers.size()) {
    fail(MachineError::Kind::kUndefined, "there is no barrier " + std::to_string(id), lane);
  }
  Barrier& barrier = cta.barriers[id];
  const uint32_t expected = op.has_count ? lanes<uint32_t>(op.b)[lane] : 0;
  if (op.has_count && (expected == 0 || expected % kLanes != 0)) {
    fail(MachineError::Kind::kUndefined, "a barrier takes whole warps of threads", lane);
  }
  if (barrier.arrived != 0 && barrier.expected != expected) {
    fail(MachineError::Kind::kUndefined,
         "others wait at barrier " + std::to_string(id) + " for another number of threads", lane);
  }
  barrier.expected = expected;
  const bool whole_warp = op.choice == 1 && op.has_count;
  barrier.arrived += whole_warp ? kLanes : static_cast<uint32_t>(std::popcount(fragment.mask));
  barrier.clock.join(snapshot());
  if (op.barrier != BarrierKind::kSync && op.barrier != BarrierKind::kArrive) {
    const uint32_t votes = (predicate(op.c) ^ op.negated) & fragment.mask;
    barrier.popc += static_cast<uint32_t>(std::popcount(votes));
    barrier.all &= votes == fragment.mask;
    barrier.any |= votes != 0;
  }
  if (op.barrier == BarrierKind::kArrive) {
    ++fragment.pc;
  } else {
    fragment.state = Fragment::State::kAtBarrier;
    fragment.barrier = id;
    barrier.waiting.push_back(this);
  }
  cta.complete_barriers();
}

void Warp::leave_barrier(uint32_t id, const Barrier& barrier) {
  clock.join(barrier.clock);
  uint32_t here = 0;
  for (const Fragment& fragment : fragments_) {
    if (fragment.state == Fragment::State::kAtBarrier && fragment.barrier == id) {
      here |= fragment.mask;
    }
  }
  meet_lanes(here);
  for (Fragment& fragment : fragments_) {
    if (fragment.state != Fragment::State::kAtBarrier || fragment.barrier != id) continue;
    const Op& op = launch.program->ops[fragment.pc];
    for (uint32_t rest = fragment.mask; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      if (op.barrier == BarrierKind::kPopc) lanes<uint32_t>(op.d)[lane] = barrier.popc;
    }
    if (op.barrier == BarrierKind::kAnd || op.barrier == BarrierKind::kOr) {
      const bool result = op.barrier == BarrierKind::kAnd ? barrier.all : barrier.any;
      uint32_t& target = predicate(op.d);
      target = result ? target | fragment.mask : target & ~fragment.mask;
    }
    fragment.state = Fragment::State::kReady;
    ++fragment.pc;
  }
}

}  // namespace axonn::gpu_machine
