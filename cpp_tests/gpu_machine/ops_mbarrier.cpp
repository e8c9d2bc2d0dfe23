// mbarrier instructions. Source: PTX ISA 9.0, section 9.7.13.15. Without a scope, the manual's
// default is the CTA, but kernels rely on it to reach the cluster, as it does on hardware. An
// explicit .cta scope neither passes on nor takes what comes from other CTAs. Within one CTA it
// makes no difference, and only threads of that CTA can wait for its mbarriers.
#include "gpu_machine/async.h"
#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr int kPhaseBits = 40;  // in a state; above them is the number of pending arrivals
constexpr uint8_t kDrops = 1, kExpects = 2, kCompletesNot = 4;  // of an arrival
constexpr uint32_t kLongestWait = 64;  // nanoseconds until a try_wait gives up

MBarrier* find(const Warp::Place& at) {
  const auto found = at.cta->mbarriers.find(at.offset);
  return found == at.cta->mbarriers.end() ? nullptr : &found->second;
}

Warp::Place place(const Op& op, Warp& warp, int lane) {
  const Warp::Place at = warp.place(warp.address(op, lane), kMBarrierBytes, kMBarrierBytes, lane,
                                    op.at.reaches_cluster);
  if (at.cta == nullptr) {
    warp.fail(MachineError::Kind::kUndefined, "an mbarrier lies in shared memory", lane);
  }
  return at;
}

MBarrier& barrier_at(const Op& op, Warp& warp, int lane, bool reaches_cluster = false) {
  const Warp::Place at = place(op, warp, lane);
  if (at.cta != &warp.cta && !reaches_cluster) {
    warp.fail(MachineError::Kind::kUndefined, "cannot use an mbarrier of another CTA", lane);
  }
  MBarrier* barrier = find(at);
  if (barrier == nullptr) {
    warp.fail(MachineError::Kind::kUndefined,
              "there is no mbarrier at shared memory + " + std::to_string(at.offset), lane);
  }
  barrier->check_initialized(warp, at.cta != &warp.cta, lane);
  return *barrier;
}

Clock released(const Op& op, Warp& warp, int lane) {
  return op.order == Order::kRelaxed ? warp.released_by_fence(op.scope) : warp.snapshot(lane);
}

// An arrival at another CTA's mbarrier, which takes effect some time later.
class RemoteArrival final : public AsyncOperation {
 public:
  RemoteArrival(const Op& op, Warp& warp, int lane, const Warp::Place& at, uint32_t count,
                int64_t bytes)
      : AsyncOperation(warp, lane, Proxy::kGeneric, {static_cast<uint64_t>(at.cta->id), at.offset}),
        at_(at),
        issued_(warp.time() - 1),
        issuer_(warp.actor.id),
        released_(op.scope == Scope::kCta       ? Clock{}
                  : op.order == Order::kRelaxed ? warp.released_by_fence(op.scope)
                                                : clock),
        count_(count),
        bytes_(bytes),
        drops_((op.choice & kDrops) != 0) {}

  void step() override {
    MBarrier* barrier = find(at_);
    if (barrier == nullptr) {
      fail(MachineError::Kind::kUndefined, "arrives where there is no mbarrier any more");
    }
    barrier->check_initialized(*this, true, -1);
    barrier->note_remote_arrival(issuer_, issued_);
    if (bytes_ != 0) barrier->expect(*this, bytes_, -1);
    if (count_ != 0) barrier->arrive(*this, count_, drops_, released_, -1);
    reach(Stage::kDone);
  }
  bool uses(const Cta& cta) const override { return &cta == at_.cta; }
  bool may_outlast_its_cta() const override { return true; }

 private:
  const Warp::Place at_;
  const uint32_t issued_, issuer_;
  const Clock released_;
  const uint32_t count_;
  const int64_t bytes_;
  const bool drops_;
};

void initialize(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const Warp::Place at = place(op, warp, i);
    const uint32_t count = warp.lanes<uint32_t>(op.b)[i];
    if (at.cta != &warp.cta || find(at) != nullptr || count == 0 || count > kMostMBarrierCount) {
      warp.fail(MachineError::Kind::kUndefined,
                at.cta != &warp.cta ? "cannot initialize an mbarrier of another CTA"
                : find(at) != nullptr
                    ? "initializes an mbarrier again that is not invalidated"
                    : "an mbarrier counts 1 to 1048575 arrivals, got " + std::to_string(count),
                i);
    }
    warp.note_write(*at.region, at.offset, kMBarrierBytes, {}, i);
    at.region->reserve(at.offset, kMBarrierBytes);
    at.cta->mbarriers.emplace(at.offset, MBarrier(warp, count));
  });
  warp.machine.note_change();
}

void invalidate(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    barrier_at(op, warp, i);
    const Warp::Place at = place(op, warp, i);
    at.cta->mbarriers.erase(at.offset);
    at.region->forget(at.offset, kMBarrierBytes);
    warp.note_write(*at.region, at.offset, kMBarrierBytes, {}, i);
    at.region->forget(at.offset, kMBarrierBytes);
  });
}

void arrive(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const bool expects = (op.choice & kExpects) != 0;
    const uint32_t operand = op.has_count ? warp.lanes<uint32_t>(op.b)[i] : 1;
    const uint32_t count = expects ? 1 : operand;
    const int64_t bytes = expects ? operand : 0;
    const Warp::Place at = place(op, warp, i);
    if (at.cta != &warp.cta) {
      warp.machine.async().begin(std::make_shared<RemoteArrival>(op, warp, i, at, count, bytes));
      return;
    }
    MBarrier& barrier = barrier_at(op, warp, i);
    const uint64_t phase = barrier.phase();
    if (op.register_bytes != 0) {
      warp.lanes<uint64_t>(op.d)[i] = phase | uint64_t{barrier.pending()} << kPhaseBits;
    }
    if (expects) barrier.expect(warp, bytes, i);
    barrier.arrive(warp, count, (op.choice & kDrops) != 0, released(op, warp, i), i);
    if ((op.choice & kCompletesNot) != 0 && barrier.phase() != phase) {
      warp.fail(MachineError::Kind::kUndefined, "an arrival with .noComplete ended the phase", i);
    }
  });
  warp.machine.note_change();
}

void expect(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const uint32_t bytes = warp.lanes<uint32_t>(op.b)[i];
    const Warp::Place at = place(op, warp, i);
    if (at.cta != &warp.cta) {
      warp.machine.async().begin(std::make_shared<RemoteArrival>(op, warp, i, at, 0, bytes));
      return;
    }
    barrier_at(op, warp, i).expect(warp, bytes, i);
  });
  warp.machine.note_change();
}

void complete(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    barrier_at(op, warp, i, true).complete(warp, warp.lanes<uint32_t>(op.b)[i], Clock{});
  });
  warp.machine.note_change();
}

// Whether the requested phase has ended.
bool has_ended(const Op& op, Warp& warp, const MBarrier& barrier, int lane) {
  if (op.choice == 0) {
    const uint32_t parity = warp.lanes<uint32_t>(op.b)[lane];
    if (parity > 1) {
      warp.fail(MachineError::Kind::kUndefined, "a parity is 0 or 1, got " + std::to_string(parity),
                lane);
    }
    return (barrier.phase() & 1u) != parity;
  }
  const uint64_t phase = warp.lanes<uint64_t>(op.b)[lane] & ((uint64_t{1} << kPhaseBits) - 1);
  if (phase != barrier.phase() && phase + 1 != barrier.phase()) {
    warp.fail(MachineError::Kind::kUndefined,
              "waits for phase " + std::to_string(phase) + " of an mbarrier in phase " +
                  std::to_string(barrier.phase()),
              lane);
  }
  return phase != barrier.phase();
}

void wait(const Op& op, Warp& warp, uint32_t mask) {
  uint32_t ended = 0;
  const MBarrier* barrier = nullptr;  // usually the same for all lanes
  uint64_t address = 0;
  bool is_learned = false;
  for_each_lane(mask, [&](int i) {
    if (barrier == nullptr || warp.address(op, i) != address) {
      barrier = &barrier_at(op, warp, i);
      address = warp.address(op, i);
      is_learned = false;
    }
    if (!has_ended(op, warp, *barrier, i)) {
      warp.note_poll(address);
      return;
    }
    ended |= 1u << i;
    if (is_learned) return;
    warp.learn(barrier->complete_clock(), op.order);
    if (op.scope != Scope::kCta) warp.learn(barrier->complete_clock_of_others(), op.order);
    is_learned = true;
  });
  store_predicate(warp, op.d, ended, mask);
  if (ended != mask && op.has_count) {
    warp.wake_at = warp.machine.now_ns() + warp.machine.draw(kLongestWait);
  }
}

void count_pending(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    warp.lanes<uint32_t>(op.d)[i] =
        static_cast<uint32_t>(warp.lanes<uint64_t>(op.a)[i] >> kPhaseBits);
  });
}

const Type kCount{'u', 32, 1}, kState{'b', 64, 1};

void take_order(Decoder& d, Order without) {
  Op& op = d.op();
  d.take_order_and_scope();
  if (op.order == Order::kWeak) op.order = without;
  if (op.scope == Scope::kNone) op.scope = Scope::kCluster;
}

Space take_barrier_space(Decoder& d) {
  const Space space = take_space(d);
  if (space != Space::kShared && space != Space::kSharedCluster && space != Space::kGeneric) {
    d.fail("an mbarrier lies in shared memory");
  }
  return space;
}

void decode_arrival(Decoder& d, bool drops) {
  Op& op = d.op();
  op.choice = drops ? kDrops : 0;
  if (d.take("expect_tx")) op.choice |= kExpects;
  if (d.take("noComplete")) op.choice |= kCompletesNot;
  take_order(d, Order::kRelease);
  const Space space = take_barrier_space(d);
  // An arrival that returns no state has one operand less.
  const bool has_state = d.num_operands() > 1 && !d.is_address(0);
  if (has_state && !d.is_sink(0)) {
    op.d = d.slot(0, kState);
    op.register_bytes = 8;
    if (space == Space::kSharedCluster) d.fail("an arrival at a cluster's mbarrier has no state");
  } else if (has_state) {
    d.operand(0);
  }
  const size_t first = has_state ? 1 : 0;
  op.at = d.address(first, space);
  op.has_count = d.num_operands() > first + 1;
  if (op.has_count) op.b = d.slot(first + 1, kCount);
  if (!op.has_count && (op.choice & (kExpects | kCompletesNot)) != 0) d.fail("expected a count");
  op.execute = arrive;
  op.flow = Flow::kYield;
}

void decode_wait(Decoder& d, bool tries) {
  Op& op = d.op();
  op.choice = d.take("parity") ? 0 : 1;
  take_order(d, Order::kAcquire);
  const Space space = take_barrier_space(d);
  op.d = d.slot(0, {'p', 1, 1});
  op.at = d.address(1, space);
  op.b = d.slot(2, op.choice == 0 ? kCount : kState);
  if (tries && d.num_operands() > 3) d.slot(3, kCount);  // the suspend time limit
  op.has_count = tries;
  op.execute = wait;
  op.flow = Flow::kYield;
}

void decode_bytes(Decoder& d, Execute execute) {
  Op& op = d.op();
  take_order(d, Order::kRelaxed);
  op.at = d.address(0, take_barrier_space(d));
  op.b = d.slot(1, kCount);
  op.execute = execute;
}

}  // namespace

bool decode_mbarrier(Decoder& d) {
  if (d.opcode() != "mbarrier") return false;
  Op& op = d.op();
  const std::string what = d.take_one({"init", "inval", "arrive", "arrive_drop", "expect_tx",
                                       "complete_tx", "test_wait", "try_wait", "pending_count"});
  if (!d.take("b64")) d.fail("expected .b64");
  if (what == "init" || what == "inval") {
    op.at = d.address(0, take_barrier_space(d));
    if (what == "init") op.b = d.slot(1, kCount);
    op.execute = what == "init" ? initialize : invalidate;
  } else if (what == "arrive" || what == "arrive_drop") {
    decode_arrival(d, what == "arrive_drop");
  } else if (what == "expect_tx") {
    decode_bytes(d, expect);
  } else if (what == "complete_tx") {
    decode_bytes(d, complete);
  } else if (what == "test_wait" || what == "try_wait") {
    decode_wait(d, what == "try_wait");
  } else if (what == "pending_count") {
    op.d = d.slot(0, kCount);
    op.a = d.slot(1, kState);
    op.execute = count_pending;
  } else {
    d.fail("the machine does not know this operation");
  }
  return true;
}

}  // namespace axonn::gpu_machine
