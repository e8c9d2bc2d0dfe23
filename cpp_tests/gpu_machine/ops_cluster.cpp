// Clusters of CTAs and their barrier, fences between proxies, and instructions about a kernel's
// registers and its dependent launches. Source: PTX ISA 9.0, sections 9.7.9.22 to 9.7.9.24,
// 9.7.13.4, 9.7.13.6, 9.7.13.14 and 9.7.20.
#include <atomic>
#include <bit>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kOffsetMask = (uint64_t{1} << kSharedBits) - 1;

// The address of the same variable in shared memory of the CTA with that rank.
template <typename T>
void map_address(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const uint64_t rank = warp.lanes<uint32_t>(op.b)[i];
    if (rank >= warp.cta.cluster.ctas.size()) {
      warp.fail(MachineError::Kind::kUndefined,
                "the cluster has no CTA of rank " + std::to_string(rank), i);
    }
    const uint64_t address = warp.lanes<T>(op.a)[i];
    const uint64_t window = address & ~(window_start(1) - 1);
    warp.lanes<T>(op.d)[i] =
        static_cast<T>(window | (rank + 1) << kSharedBits | (address & kOffsetMask));
  });
}

template <typename T>
void rank_of_address(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const uint64_t address = warp.lanes<T>(op.a)[i] & (window_start(1) - 1);
    const uint64_t window = address >> kSharedBits;
    warp.lanes<uint32_t>(op.d)[i] = window == 0 ? warp.cta.rank : static_cast<uint32_t>(window - 1);
  });
}

void arrive(const Op& op, Warp& warp, uint32_t mask) {
  Cluster& cluster = warp.cta.cluster;
  if (const uint32_t twice = warp.cluster_arrived & mask) {
    warp.fail(MachineError::Kind::kUndefined,
              "arrives at barrier.cluster again before it has waited", std::countr_zero(twice));
  }
  warp.cluster_arrived |= mask;
  for_each_lane(mask, [&](int i) { warp.cluster_phases[static_cast<size_t>(i)] = cluster.phase; });
  cluster.arrived += static_cast<uint32_t>(std::popcount(mask));
  cluster.arriving.join(op.order == Order::kRelaxed ? warp.released_by_fence(Scope::kCluster)
                                                    : warp.snapshot());
  cluster.complete_barrier();
}

bool has_phase_ended(const Op&, Warp& warp, uint32_t mask) {
  if (const uint32_t early = mask & ~warp.cluster_arrived) {
    warp.fail(MachineError::Kind::kUndefined, "waits at barrier.cluster, where it has not arrived",
              std::countr_zero(early));
  }
  bool ended = true;
  for_each_lane(mask, [&](int i) {
    ended &= warp.cta.cluster.phase > warp.cluster_phases[static_cast<size_t>(i)];
  });
  return ended;
}

void leave(const Op&, Warp& warp, uint32_t mask) {
  warp.cluster_arrived &= ~mask;
  warp.clock.join(warp.cta.cluster.complete);
  warp.meet_lanes(mask);
}

// A host fence as well, for the sake of other processes.
void fence(const Op& op, Warp& warp, uint32_t) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  warp.fence(op.scope);
}
// The kinds of the fence are bits of `choice`.
void fence_proxies(const Op& op, Warp& warp, uint32_t mask) {
  if (op.scope != Scope::kNone) fence(op, warp, mask);
  for (size_t i = 0; i < kNumProxyFences; ++i) {
    if ((op.choice >> i & 1u) != 0) warp.fence_proxy(static_cast<ProxyFence>(i));
  }
}
constexpr uint8_t bit(ProxyFence fence) {
  return static_cast<uint8_t>(1u << static_cast<unsigned>(fence));
}

bool has_registers(const Op& op, Warp& warp, uint32_t) {
  const auto now = warp.registers_per_thread;
  return op.target <= now || (op.target - now) * kLanes <= warp.cta.free_registers;
}

void set_registers(const Op& op, Warp& warp, uint32_t) {
  const uint32_t now = warp.registers_per_thread;
  const bool grows = op.choice != 0;
  if (grows ? op.target < now : op.target > now) {
    warp.fail(MachineError::Kind::kUndefined, "its threads have " + std::to_string(now) +
                                                  " registers, which it cannot " +
                                                  (grows ? "increase" : "decrease") + " to this");
  }
  warp.cta.free_registers += (now - op.target) * kLanes;  // grows if now > target, else shrinks
  warp.registers_per_thread = op.target;
  warp.machine.note_change();
}

void see_prior(const Op&, Warp& warp, uint32_t) { warp.clock.join(warp.launch.prior); }

void do_nothing(const Op&, Warp&, uint32_t) {}

Scope take_scope(Decoder& d, Scope without) {
  const std::string level = d.take_one({"cta", "gl", "gpu", "cluster", "sys"});
  return level.empty()                     ? without
         : level == "cta"                  ? Scope::kCta
         : level == "cluster"              ? Scope::kCluster
         : level == "gl" || level == "gpu" ? Scope::kGpu
                                           : Scope::kSystem;
}

void decode_proxy_fence(Decoder& d) {
  Op& op = d.op();
  op.execute = fence_proxies;
  if (d.take("alias")) {
    op.choice = bit(ProxyFence::kAlias);
  } else if (d.take("async")) {
    const std::string space = d.take_one({"global", "shared::cta", "shared::cluster"});
    op.choice = space == "global" ? bit(ProxyFence::kAsyncGlobal)
                : !space.empty()  ? bit(ProxyFence::kAsyncShared)
                                  : bit(ProxyFence::kAsyncGlobal) | bit(ProxyFence::kAsyncShared);
  } else if (d.take("tensormap::generic")) {
    const bool acquires = d.take("acquire");
    if (!acquires && !d.take("release")) d.fail("expected .acquire or .release");
    op.scope = take_scope(d, Scope::kNone);
    if (op.scope == Scope::kNone) d.fail("expected a scope");
    if (!acquires) return;
    op.choice = bit(ProxyFence::kTensormap);
    d.address(0, Space::kGeneric);
    if (d.operand(1).bits != 128) d.fail("a descriptor has 128 bytes");
  } else {
    d.fail("the machine does not know this proxy");
  }
}

void decode_fence(Decoder& d) {
  Op& op = d.op();
  if (d.take("proxy")) return decode_proxy_fence(d);
  if (d.take("mbarrier_init")) {
    if (!d.take("release") || !d.take("cluster")) d.fail("expected .release.cluster");
    op.execute = fence_proxies;
    op.choice = bit(ProxyFence::kBarrierInit);
    return;
  }
  op.execute = fence;
  op.scope = take_scope(d, Scope::kSystem);
  if (d.opcode() == "fence" && !d.take("sc") && !d.take("acq_rel")) {
    d.fail("expected .sc or .acq_rel");
  }
}

void decode_cluster_barrier(Decoder& d) {
  Op& op = d.op();
  const bool is_aligned = d.take("aligned");
  if (d.take("arrive")) {
    op.order = d.take("relaxed") ? Order::kRelaxed : Order::kRelease;
    d.take("release");
    op.execute = arrive;
    if (is_aligned) op.flow = Flow::kMeetAll;
    return;
  }
  if (!d.take("wait")) d.fail("expected .arrive or .wait");
  d.take("acquire");
  op.execute = leave;
  op.ready = has_phase_ended;
  op.flow = is_aligned ? Flow::kMeetAll : Flow::kWait;
}

void decode_registers(Decoder& d) {
  Op& op = d.op();
  op.choice = d.take("inc") ? 1 : 0;
  if (op.choice == 0 && !d.take("dec")) d.fail("expected .inc or .dec");
  if (!d.take("sync") || !d.take("aligned")) d.fail("expected .sync.aligned");
  d.take_type();
  op.target = static_cast<uint32_t>(d.operand(0).bits);
  if (op.target < 24 || op.target > 256 || op.target % 8 != 0) {
    d.fail("expected 24 to 256 registers, a multiple of 8");
  }
  op.flow = Flow::kMeetAll;
  if (op.choice == 1) op.ready = has_registers;
  op.execute = set_registers;
}

void decode_map(Decoder& d) {
  Op& op = d.op();
  d.take_one({"shared::cluster"});
  const Type type = d.take_type();
  const bool maps = d.opcode() == "mapa";
  const bool is_wide = type.bits == 64;
  op.d = d.slot(0, maps ? type : Type{'u', 32, 1});
  op.a = d.slot(1, type);
  if (maps) op.b = d.slot(2, {'u', 32, 1});
  if (maps) {
    op.execute = is_wide ? map_address<uint64_t> : map_address<uint32_t>;
  } else {
    op.execute = is_wide ? rank_of_address<uint64_t> : rank_of_address<uint32_t>;
  }
}

}  // namespace

bool decode_cluster(Decoder& d) {
  const std::string& opcode = d.opcode();
  if (opcode == "mapa" || opcode == "getctarank") {
    decode_map(d);
  } else if (opcode == "fence" || opcode == "membar") {
    decode_fence(d);
  } else if (opcode == "barrier" && d.take("cluster")) {
    decode_cluster_barrier(d);
  } else if (opcode == "setmaxnreg") {
    decode_registers(d);
  } else if (opcode == "griddepcontrol") {
    // Launches of a stream run one after the other here, so there is nothing to wait for. But a
    // kernel that was allowed to begin early has not seen, before the wait, what came ahead of it.
    const std::string what = d.take_one({"wait", "launch_dependents"});
    if (what.empty()) d.fail("expected what it does");
    d.op().execute = what == "wait" ? see_prior : do_nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace axonn::gpu_machine
