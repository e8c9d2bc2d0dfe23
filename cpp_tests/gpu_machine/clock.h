// Who has seen what. A clock tells which accesses of other warps are ordered before the next one of
// its owner: those of launches that have ended, and those of a warp up to a time of that warp.
// Source: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI
// 2009, with warps in place of threads; NVIDIA, PTX ISA 9.0, section 8 (memory consistency model).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

namespace axonn::gpu_machine {

// How far an access of the memory model reaches. Weak accesses have none.
enum class Scope : uint8_t { kNone, kCta, kCluster, kGpu, kSystem };

// Where a warp, a copy engine or the host runs, to tell whether a scope reaches it.
struct Actor {
  uint32_t id = 0;
  uint32_t launch = 0;
  int device = 0;
  int64_t cta = -1;  // unique over all launches; -1 for a copy engine
  int warp = 0;      // of the CTA
};

struct Clock {
  std::set<uint32_t> launches;          // that have ended, as far as the owner can know
  std::map<uint32_t, uint32_t> actors;  // by id: the last time of theirs that it has seen

  void join(const Clock& other) {
    launches.insert(other.launches.begin(), other.launches.end());
    for (const auto& [actor, time] : other.actors) {
      uint32_t& own = actors[actor];
      own = std::max(own, time);
    }
  }
  bool has_seen(uint32_t actor, uint32_t launch, uint32_t time) const {
    if (launches.contains(launch)) return true;
    const auto found = actors.find(actor);
    return found != actors.end() && found->second >= time;
  }
};

// Whether an access of one with this scope can reach the other.
inline bool reaches(Scope scope, const Actor& from, const Actor& to) {
  switch (scope) {
    case Scope::kNone:
      return false;
    case Scope::kCta:
    case Scope::kCluster:  // clusters are of one CTA
      return from.cta == to.cta;
    case Scope::kGpu:
      return from.device == to.device;
    case Scope::kSystem:
      return true;
  }
  return false;
}

}  // namespace axonn::gpu_machine
