#include "gpu_machine/warp.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "gpu_machine/copy_groups.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/products.h"

namespace axonn::gpu_machine {
namespace {

std::byte* aligned(std::byte* place) {
  const auto address = reinterpret_cast<uintptr_t>(place);
  return place + (kRegisterAlignment - address % kRegisterAlignment) % kRegisterAlignment;
}

}  // namespace

Warp::Warp(Machine& of_machine, Launch& of_launch, Cta& of_cta, int its_index, uint32_t lanes)
    : Agent(of_machine,
            of_machine.new_actor({0, of_launch.id, of_launch.device, of_cta.id, of_cta.cluster.id,
                                  its_index, false}),
            of_launch.before),
      launch(of_launch),
      cta(of_cta),
      index(its_index),
      memory_(
          std::make_unique<std::byte[]>(of_launch.program->register_bytes + kRegisterAlignment)),
      registers_(aligned(memory_.get())) {
  fragments_.reserve(kLanes + 1);  // keeps pointers to fragments valid
  fragments_.push_back({0, lanes, Fragment::State::kReady, 0});
  registers_per_thread = registers_of_thread(*launch.program, launch.block.count());
  fill_constants();
  copies_ = std::make_unique<CopyGroups>();
  products_ = std::make_unique<Products>(launch.program->register_bytes);
  if (launch.program->local_bytes != 0) {
    local_ = std::make_unique<Region>("local memory", launch.program->local_bytes * kLanes);
  }
}

Warp::~Warp() = default;

void Warp::fill_constants() {
  for (const Constant& constant : launch.program->constants) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t bits = constant.kind == Constant::Kind::kImmediate
                                ? constant.bits
                                : special(constant.special, i);
      std::memcpy(registers_ + constant.slot + i * constant.bytes, &bits,
                  static_cast<size_t>(constant.bytes));
    }
  }
}

uint64_t Warp::special(const std::string& name, int lane) const {
  const uint64_t thread = static_cast<uint64_t>(index) * kLanes + static_cast<uint64_t>(lane);
  const Dim block = launch.block, grid = launch.grid, place = cta.index;
  const uint64_t bit = uint64_t{1} << lane;
  if (name == "%tid.x") return thread % block.x;
  if (name == "%tid.y") return thread / block.x % block.y;
  if (name == "%tid.z") return thread / block.x / block.y;
  if (name == "%ntid.x") return block.x;
  if (name == "%ntid.y") return block.y;
  if (name == "%ntid.z") return block.z;
  if (name == "%ctaid.x") return place.x;
  if (name == "%ctaid.y") return place.y;
  if (name == "%ctaid.z") return place.z;
  if (name == "%nctaid.x") return grid.x;
  if (name == "%nctaid.y") return grid.y;
  if (name == "%nctaid.z") return grid.z;
  const Dim shape = cta.cluster.shape;
  if (name == "%cluster_ctaid.x") return place.x % shape.x;
  if (name == "%cluster_ctaid.y") return place.y % shape.y;
  if (name == "%cluster_ctaid.z") return place.z % shape.z;
  if (name == "%cluster_nctaid.x") return shape.x;
  if (name == "%cluster_nctaid.y") return shape.y;
  if (name == "%cluster_nctaid.z") return shape.z;
  if (name == "%clusterid.x") return place.x / shape.x;
  if (name == "%clusterid.y") return place.y / shape.y;
  if (name == "%clusterid.z") return place.z / shape.z;
  if (name == "%nclusterid.x") return grid.x / shape.x;
  if (name == "%nclusterid.y") return grid.y / shape.y;
  if (name == "%nclusterid.z") return grid.z / shape.z;
  if (name == "%cluster_ctarank") return cta.rank;
  if (name == "%cluster_nctarank") return shape.count();
  if (name == "%laneid") return static_cast<uint64_t>(lane);
  if (name == "%warpid") return static_cast<uint64_t>(index);
  if (name == "%nwarpid") return (block.count() + kLanes - 1) / kLanes;
  if (name == "%lanemask_eq") return bit;
  if (name == "%lanemask_lt") return bit - 1;
  if (name == "%lanemask_le") return 2 * bit - 1;
  if (name == "%lanemask_gt") return kAllLanes & ~(2 * bit - 1);
  if (name == "%lanemask_ge") return kAllLanes & ~(bit - 1);
  return launch.dynamic_shared_bytes;  // %dynamic_smem_size, the only one left
}

uint32_t Warp::live_lanes() const {
  uint32_t lanes = 0;
  for (const Fragment& fragment : fragments_) lanes |= fragment.mask;
  return lanes;
}

bool Warp::is_ready(const Fragment& fragment) {
  if (fragment.state != Fragment::State::kWaiting) return fragment.state == Fragment::State::kReady;
  const Op& op = launch.program->ops[fragment.pc];
  return op.ready(op, *this, fragment.mask);
}

bool Warp::is_blocked() {
  return std::none_of(fragments_.begin(), fragments_.end(),
                      [&](const Fragment& fragment) { return is_ready(fragment); });
}

int Warp::run(int quantum) {
  // Now and then lets lanes ahead of the others run, as independent threads may.
  in_any_order_ = fragments_.size() > 1 && machine.draw(8) == 0;
  Fragment* fragment = choose();
  int ran = 0;
  while (fragment != nullptr && ran < quantum) {
    ++ran;
    if (!step(fragment)) break;
  }
  return ran;
}

Fragment* Warp::choose() {
  Fragment* chosen = nullptr;
  uint32_t ready = 0;
  bool waits = false;
  for (Fragment& fragment : fragments_) {
    waits |= fragment.state == Fragment::State::kAtBarrier ||
             fragment.state == Fragment::State::kWaiting;
    if (!is_ready(fragment)) continue;
    ++ready;
    const bool better =
        chosen == nullptr || (in_any_order_ ? machine.draw(ready) == 0 : fragment.pc < chosen->pc);
    if (better) chosen = &fragment;
  }
  if (chosen == nullptr && !waits && !fragments_.empty()) fail_stuck();
  return chosen;
}

bool Warp::step(Fragment*& fragment) {
  if (fragments_.size() > 1) {
    if (!in_any_order_) fragment = choose();
    merge_at(fragment);
  }
  const auto& ops = launch.program->ops;
  if (fragment->pc >= ops.size()) {
    exit(fragment, fragment->mask);
    return fragment != nullptr;
  }
  current_pc_ = fragment->pc;
  const Op& op = ops[fragment->pc];
  uint32_t mask = fragment->mask;
  if (op.has_guard) {
    const uint32_t guard = predicate(op.guard);
    mask &= op.guard_negated ? ~guard : guard;
  }
  if (op.num_touched != 0 && mask != 0) products_->check_touch(op, *this);
  if (op.flow == Flow::kNext || mask == 0) {
    if (mask != 0) op.execute(op, *this, mask);
    ++fragment->pc;
    return true;
  }
  if (op.flow == Flow::kBranch) {
    branch(*fragment, op, mask);
    return true;
  }
  if (op.flow == Flow::kExit) {
    exit(fragment, mask);
    return fragment != nullptr;
  }
  if (op.flow == Flow::kYield) {
    op.execute(op, *this, mask);
    ++fragment->pc;
    return false;
  }
  if (mask != fragment->mask) split_off(*fragment, fragment->mask & ~mask);
  if (op.flow != Flow::kWait && !meets(*fragment, op)) {
    fragment = choose();
    return fragment != nullptr;
  }
  if (op.ready != nullptr && !op.ready(op, *this, fragment->mask)) {
    fragment->state = Fragment::State::kWaiting;
    fragment = choose();
    return fragment != nullptr;
  }
  fragment->state = Fragment::State::kReady;
  if (op.flow == Flow::kBarrier) {
    arrive(*fragment, op);
    return false;
  }
  op.execute(op, *this, mask);
  ++fragment->pc;
  return true;
}

void Warp::remove(Fragment* victim, Fragment*& fragment) {
  if (fragment == &fragments_.back()) fragment = victim;
  *victim = fragments_.back();
  fragments_.pop_back();
}

void Warp::merge_at(Fragment*& fragment) {
  for (size_t i = fragments_.size(); i-- > 0;) {
    Fragment* other = &fragments_[i];
    if (other == fragment || other->pc != fragment->pc ||
        other->state == Fragment::State::kAtBarrier) {
      continue;
    }
    fragment->mask |= other->mask;
    remove(other, fragment);
  }
}

void Warp::branch(Fragment& fragment, const Op& op, uint32_t taken) {
  if (taken == fragment.mask) {
    fragment.pc = op.target;
    return;
  }
  fragments_.push_back({op.target, taken, Fragment::State::kReady, 0});
  fragment.mask &= ~taken;
  ++fragment.pc;
}

void Warp::split_off(Fragment& fragment, uint32_t lanes) {
  fragments_.push_back({fragment.pc + 1, lanes, Fragment::State::kReady, 0});
  fragment.mask &= ~lanes;
}

void Warp::exit(Fragment*& fragment, uint32_t mask) {
  fragment->mask &= ~mask;
  ++fragment->pc;
  if (fragment->mask == 0) remove(fragment, fragment);
  for (Fragment& other : fragments_) {  // they now wait for fewer lanes
    if (other.state == Fragment::State::kAtMeeting) other.state = Fragment::State::kReady;
  }
  cta.complete_barriers();
  cta.cluster.complete_barrier();
  fragment = fragments_.empty() ? nullptr : choose();
}

}  // namespace axonn::gpu_machine
