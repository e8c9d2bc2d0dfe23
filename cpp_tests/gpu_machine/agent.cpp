#include "gpu_machine/agent.h"

#include <algorithm>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {

Clock Agent::snapshot(int lane) {
  clock.see(actor.id, time_++);
  if (lane >= 0) {
    Clock known = clock;
    if (const Clock* own = learned_by(lane)) known.join(*own);
    return known;
  }
  for (const auto& [other, learned] : learned_) clock.join(learned);
  learned_.clear();
  return clock;
}

Clock Agent::released_by_fence(Scope scope) const {
  Clock result;
  if (fence_scope_ >= scope) result = fence_clock_;
  if (init_fence_ != 0) result.see_fenced(actor.id, init_fence_, ProxyFence::kBarrierInit);
  return result;
}

const Clock* Agent::learned_by(int lane) const {
  const auto found = std::find_if(learned_.begin(), learned_.end(),
                                  [&](const auto& entry) { return entry.first == lane; });
  return found == learned_.end() ? nullptr : &found->second;
}

bool Agent::is_ordered(const Mark& mark, int lane) const {
  if (mark.actor == 0 || !machine.is_of_this_run(mark.actor)) return true;
  if (mark.actor == actor.id) {
    return lane < 0 || actor.is_async || mark.lane == kWholeWarp ||
           mark.lane == static_cast<uint32_t>(lane) ||
           mark.time <= others_seen_[static_cast<size_t>(lane)];
  }
  const uint32_t launch = machine.actor(mark.actor).launch;
  if (clock.has_seen(mark.actor, launch, mark.time)) return true;
  const Clock* own = learned_by(lane);
  return own != nullptr && own->has_seen(mark.actor, launch, mark.time);
}

// Returns the proxy fence that is missing before this agent's proxy, through this address, sees an
// earlier write that is already ordered. Everyone sees the writes of the async proxy, since the
// completion of an asynchronous operation is a proxy fence.
Agent::Lacks Agent::fence_that_lacks(const Mark& write, Access access, const Region& region,
                                     int lane) const {
  const bool same_proxy = proxy == Proxy::kGeneric || static_cast<Proxy>(write.proxy) == proxy;
  if (same_proxy && write.alias == access.alias) return Lacks::kNothing;
  if (write.actor == 0 || !machine.is_of_this_run(write.actor)) return Lacks::kNothing;
  const uint32_t launch = machine.actor(write.actor).launch;
  const Clock* own = learned_by(lane);
  const auto is_fenced = [&](ProxyFence fence) {
    return clock.has_seen_fenced(write.actor, launch, write.time, fence) ||
           (own != nullptr && own->has_seen_fenced(write.actor, launch, write.time, fence));
  };
  const ProxyFence fence = proxy == Proxy::kTensormap ? ProxyFence::kTensormap
                           : region.is_shared         ? ProxyFence::kAsyncShared
                                                      : ProxyFence::kAsyncGlobal;
  if (!same_proxy && !is_fenced(fence)) return Lacks::kProxyFence;
  if (write.alias != access.alias && !is_fenced(ProxyFence::kAlias)) return Lacks::kAliasFence;
  return Lacks::kNothing;
}

void Agent::check_race(const Mark& mark, Access access, const Region& region, uint64_t offset,
                       int lane, Pair accesses) const {
  // Lanes that write one location in the same instruction do so in some order, which CUDA allows.
  const bool same_warp = mark.actor == actor.id && mark.alias == access.alias;
  if (accesses == Pair::kWriteAfterWrite && same_warp) return;
  Lacks lacks = Lacks::kOrder;
  if (is_ordered(mark, lane)) {
    if (accesses == Pair::kWriteAfterRead) return;
    lacks = fence_that_lacks(mark, access, region, lane);
    if (lacks == Lacks::kNothing) return;
    if (lacks == Lacks::kProxyFence) fail_race(mark, region, offset, lane, accesses, lacks);
  }
  // A flag may be written through one address and read through another.
  const Actor& other = machine.actor(mark.actor);
  const bool both_strong =
      reaches(static_cast<Scope>(mark.scope), other, actor) && reaches(access.scope, actor, other);
  if (!both_strong) fail_race(mark, region, offset, lane, accesses, lacks);
}

void Agent::fail_race(const Mark& mark, const Region& region, uint64_t offset, int lane,
                      Pair accesses, Lacks lacks) const {
  const Actor& other = machine.actor(mark.actor);
  const std::string cta = other.cta < 0
                              ? "a copy"
                              : (other.is_async ? "an asynchronous operation of warp " : "warp ") +
                                    std::to_string(other.warp) + " of " +
                                    (other.cta == actor.cta           ? "the same CTA"
                                     : other.cluster == actor.cluster ? "another CTA of its cluster"
                                                                      : "another CTA");
  const char* pair = accesses == Pair::kReadAfterWrite    ? "read after the write"
                     : accesses == Pair::kWriteAfterWrite ? "write after the write"
                                                          : "write after the read";
  const std::string cause = lacks == Lacks::kOrder        ? "race: nothing orders"
                            : lacks == Lacks::kAliasFence ? "race: no fence.proxy.alias orders"
                            : proxy == Proxy::kTensormap  ? "race: no fence.proxy.tensormap orders"
                                                          : "race: no fence.proxy.async orders";
  fail(MachineError::Kind::kRace,
       cause + " this " + pair + " by " + cta + " of rank " + std::to_string(other.device) +
           ", at " + region.name + " + " + std::to_string(offset),
       lane);
}

Mark Agent::own_mark(Access access, int lane) const {
  Mark mark;
  mark.actor = actor.id & (kMostActors - 1);
  mark.lane = lane < 0 ? kWholeWarp : static_cast<uint32_t>(lane) & 31u;
  mark.time = time_ & 0x1FFFFFFu;
  mark.scope = static_cast<uint32_t>(access.scope) & 7u;
  mark.proxy = static_cast<uint32_t>(proxy) & 3u;
  mark.alias = access.alias & 3u;
  return mark;
}

// Single bytes are not checked for races, because their neighbours share a granule.
void Agent::mark_reads(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane) {
  if (region.read_only || bytes == 1 || !machine.options().checks_races) return;
  const Mark mark = own_mark(access, lane);
  Mark checked;  // neighbours often have the same mark
  const uint64_t end = (offset + bytes + kGranuleBytes - 1) / kGranuleBytes;
  for (uint64_t i = offset / kGranuleBytes; i < end; ++i) {
    Granule& granule = region.granules[i];
    if (granule.write != checked) {
      checked = granule.write;
      check_race(checked, access, region, i * kGranuleBytes, lane, Pair::kReadAfterWrite);
    }
    if (granule.reads[0].actor != actor.id) granule.reads[1] = granule.reads[0];
    granule.reads[0] = mark;
  }
}

void Agent::mark_writes(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane) {
  if (bytes == 1 || !machine.options().checks_races) return;
  const Mark mark = own_mark(access, lane);
  Granule checked;
  const uint64_t end = (offset + bytes + kGranuleBytes - 1) / kGranuleBytes;
  for (uint64_t i = offset / kGranuleBytes; i < end; ++i) {
    Granule& granule = region.granules[i];
    const uint64_t place = i * kGranuleBytes;
    if (granule.write != checked.write) {
      checked.write = granule.write;
      check_race(checked.write, access, region, place, lane, Pair::kWriteAfterWrite);
    }
    for (int read = 0; read < 2; ++read) {
      if (granule.reads[read] == checked.reads[read]) continue;
      checked.reads[read] = granule.reads[read];
      check_race(checked.reads[read], access, region, place, lane, Pair::kWriteAfterRead);
    }
    granule.write = mark;
  }
}

void Agent::check_written(const Region& region, uint64_t offset, uint32_t bytes, int lane) const {
  if (region.counts_as_written) return;
  const uint8_t* written = region.written.data() + offset;
  const uint8_t* other =
      std::find_if(written, written + bytes, [](uint8_t what) { return what != kWritten; });
  if (other == written + bytes) return;
  const auto place = offset + static_cast<uint64_t>(other - written);
  fail(MachineError::Kind::kMemory,
       std::string(*other == kReserved ? "reads bytes of an mbarrier"
                                       : "reads what nobody has written") +
           ", at " + region.name + " + " + std::to_string(place),
       lane);
}

void Agent::check_not_reserved(const Region& region, uint64_t offset, uint32_t bytes,
                               int lane) const {
  const uint8_t* written = region.written.data() + offset;
  if (std::find(written, written + bytes, kReserved) == written + bytes) return;
  fail(MachineError::Kind::kMemory,
       "writes over an mbarrier, at " + region.name + " + " + std::to_string(offset), lane);
}

void Agent::note_read(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane) {
  check_written(region, offset, bytes, lane);
  mark_reads(region, offset, bytes, access, lane);
  if (access.order != Order::kWeak) acquire(region, offset, access, lane);
}

void Agent::note_write(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane) {
  if (region.has_reserved) check_not_reserved(region, offset, bytes, lane);
  mark_writes(region, offset, bytes, access, lane);
  if (region.is_host) note_host_write(region, access, lane);
  region.mark(offset, bytes, kWritten);
  release(region, offset, access, false, lane);
}

void Agent::note_update(Region& region, uint64_t offset, uint32_t bytes, Access access, int lane) {
  check_written(region, offset, bytes, lane);
  acquire(region, offset, access, lane);
  mark_reads(region, offset, bytes, access, lane);
  mark_writes(region, offset, bytes, access, lane);
  if (region.is_host) note_host_write(region, access, lane);
  release(region, offset, access, true, lane);
}

void Agent::learn(const Clock& released, Order order, int lane) {
  const bool acquires = order == Order::kAcquire || order == Order::kAcquireRelease;
  if (!acquires || lane < 0) return (acquires ? clock : pending_).join(released);
  for (auto& [known, learned] : learned_) {
    if (known == lane) return learned.join(released);
  }
  learned_.emplace_back(lane, released);
}

void Agent::meet_lanes(uint32_t lanes) {
  std::erase_if(learned_, [&](const auto& entry) {
    const bool is_there = (lanes >> entry.first & 1u) != 0;
    if (is_there) clock.join(entry.second);
    return is_there;
  });
  for (size_t lane = 0; lane < others_seen_.size(); ++lane) {
    if ((lanes >> lane & 1u) != 0) others_seen_[lane] = time_;
  }
  ++time_;
}

void Agent::acquire(Region& region, uint64_t offset, Access access, int lane) {
  // Another process may have written this value, after learning all that was released to it.
  if (region.is_of_processes() && access.scope == Scope::kSystem) {
    learn(machine.told_to_others(), access.order, lane);
  }
  const auto found = region.released.find(offset);
  if (found == region.released.end()) return;
  const Released& released = found->second;
  const Actor& other = machine.actor(released.actor);
  if (!reaches(released.scope, other, actor) || !reaches(access.scope, actor, other)) return;
  learn(released.clock, access.order, lane);
}

void Agent::release(Region& region, uint64_t offset, Access access, bool is_update, int lane) {
  const bool releases = access.order == Order::kRelease || access.order == Order::kAcquireRelease;
  const bool behind_fence = access.order != Order::kWeak && fence_scope_ != Scope::kNone;
  if (!releases && !behind_fence) {
    // An update continues what was released before it; any other write ends that.
    if (!is_update && !region.released.empty()) region.released.erase(offset);
    return;
  }
  Released now{releases ? snapshot(lane) : fence_clock_,
               releases ? access.scope : std::min(access.scope, fence_scope_), actor.id};
  if (region.is_of_processes() && now.scope == Scope::kSystem) {
    machine.told_to_others().join(now.clock);
  }
  Released& place = region.released[offset];
  if (is_update) now.clock.join(place.clock);
  place = now;
}

void Agent::fence_proxy(ProxyFence fence) {
  if (fence == ProxyFence::kBarrierInit) init_fence_ = time_;
  clock.see(actor.id, time_++);
  clock.fence(fence);
  for (auto& [lane, learned] : learned_) learned.fence(fence);
}

// The host polls flags, which are strong writes, while kernels run.
void Agent::note_host_write(const Region& region, Access access, int lane) {
  const bool releases = access.order == Order::kRelease || access.order == Order::kAcquireRelease;
  if (lane < 0 || actor.is_async) return;
  const uint32_t bit = 1u << lane;
  if ((owe_host_ & bit) != 0 && access.order != Order::kWeak && !releases) {
    fail(MachineError::Kind::kRace,
         "race: nothing orders this write of " + region.name +
             " for the host behind what was written there before",
         lane);
  }
  owe_host_ |= bit;
}

void Agent::fence(Scope scope) {
  if (scope == Scope::kSystem) owe_host_ = 0;
  clock.join(pending_);
  pending_ = Clock{};
  fence_clock_ = snapshot();
  fence_scope_ = scope;
}

}  // namespace axonn::gpu_machine
