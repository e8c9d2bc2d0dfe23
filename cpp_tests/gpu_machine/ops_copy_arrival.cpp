// cp.async.mbarrier.arrive: arrives at an mbarrier when the thread's earlier cp.async copies have
// ended. Source: PTX ISA 9.0, section 9.7.13.15.18.
#include <algorithm>

#include "gpu_machine/copy_groups.h"
#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kIdentity = 0xC1;  // sets these operations apart from others

// Arrivals of lanes that run one instruction together, each some time after its copies.
class CopyArrival final : public AsyncOperation {
 public:
  struct One {
    uint64_t offset;                            // of the mbarrier
    std::vector<CopyGroups::Operation> copies;  // the copies it waits for
    Clock before;                               // clock of earlier copies, which have ended
  };

  CopyArrival(Warp& issuer, std::vector<One> arrivals)
      : AsyncOperation(issuer, -1, Proxy::kGeneric, {issuer.actor.id, kIdentity}),
        cta_(issuer.cta),
        arrivals_(std::move(arrivals)) {
    await_a_copy();
  }

  void step() override {
    for (size_t i = arrivals_.size(); i-- > 0;) {
      if (!have_ended(arrivals_[i]) || machine.draw(4) == 0) continue;
      arrive(arrivals_[i]);
      std::swap(arrivals_[i], arrivals_.back());
      arrivals_.pop_back();
    }
    if (arrivals_.empty()) return reach(Stage::kDone);
    await_a_copy();
  }
  bool uses(const Cta& cta) const override { return &cta == &cta_; }

 private:
  // Unless an arrival can happen now, makes the next step wait for a pending copy.
  void await_a_copy() {
    if (std::any_of(arrivals_.begin(), arrivals_.end(), have_ended)) return;
    const auto& copies = arrivals_.front().copies;
    behind = *std::find_if(copies.begin(), copies.end(),
                           [](const auto& copy) { return copy->stage() != Stage::kDone; });
  }
  static bool have_ended(const One& one) {
    return std::all_of(one.copies.begin(), one.copies.end(),
                       [](const auto& copy) { return copy->stage() == Stage::kDone; });
  }
  // Passes on what the copies have done, but not what the thread itself has written since.
  void arrive(const One& one) {
    const auto found = cta_.mbarriers.find(one.offset);
    if (found == cta_.mbarriers.end()) {
      fail(MachineError::Kind::kUndefined, "arrives where there is no mbarrier any more");
    }
    found->second.check_initialized(*this, false, -1);
    Clock released = one.before;
    for (const auto& copy : one.copies) released.join(copy->seen_at(Stage::kDone));
    found->second.arrive(*this, 1, false, released, -1);
  }

  Cta& cta_;
  std::vector<One> arrivals_;
};

// If an Op's `choice` is 1, the phase waits for one more arrival than it was initialized for.
void begin(const Op& op, Warp& warp, uint32_t mask) {
  std::vector<CopyArrival::One> arrivals;
  warp.copies().forget_ended();
  for_each_lane(mask, [&](int i) {
    const Warp::Place at =
        warp.place(warp.address(op, i), kMBarrierBytes, kMBarrierBytes, i, false);
    const auto found =
        at.cta == nullptr ? warp.cta.mbarriers.end() : warp.cta.mbarriers.find(at.offset);
    if (found == warp.cta.mbarriers.end()) {
      warp.fail(MachineError::Kind::kUndefined, "there is no mbarrier of this CTA", i);
    }
    found->second.check_initialized(warp, false, i);
    if (op.choice == 1) found->second.await_one_more(warp, i);
    arrivals.push_back({at.offset, warp.copies().under_way(1u << i), warp.copies().ended()});
  });
  if (arrivals.empty()) return;
  warp.machine.async().begin(std::make_shared<CopyArrival>(warp, std::move(arrivals)));
}

}  // namespace

bool decode_copy_arrival(Decoder& d) {
  if (d.opcode() != "cp" || !d.has_modifier("mbarrier")) return false;
  if (!d.take("async") || !d.take("mbarrier") || !d.take("arrive")) {
    d.fail("expected .async.mbarrier.arrive");
  }
  Op& op = d.op();
  op.choice = d.take("noinc") ? 0 : 1;
  const Space space = take_space(d);
  if (space != Space::kShared && space != Space::kGeneric) {
    d.fail("the mbarrier lies in shared memory of the CTA");
  }
  if (!d.take("b64")) d.fail("expected .b64");
  op.at = d.address(0, space);
  op.execute = begin;
  op.flow = Flow::kYield;
  return true;
}

}  // namespace axonn::gpu_machine
