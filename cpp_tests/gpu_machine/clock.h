// Who has seen what. A clock tells which accesses of others are ordered before the next access of
// its owner: all those of ended launches, and those of an actor up to some time of that actor.
// Source: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI
// 2009, with warps in place of threads; NVIDIA, PTX ISA 9.0, section 8 (memory consistency model).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace axonn::gpu_machine {

// How far an access reaches, in terms of the memory model. Weak accesses have no scope.
enum class Scope : uint8_t { kNone, kCta, kCluster, kGpu, kSystem };

// The path an access takes to memory. A proxy sees another one's writes only after a proxy fence.
enum class Proxy : uint8_t { kGeneric, kAsync, kTensormap };

// Which accesses a proxy fence makes visible, and to which proxy.
enum class ProxyFence : uint8_t {
  kAsyncShared,  // generic accesses of shared memory, for the async proxy
  kAsyncGlobal,  // generic accesses of other memory, for the async proxy
  kTensormap,    // generic accesses of descriptors, for the tensormap proxy
  kBarrierInit,  // mbarrier.init, for the cluster and the async proxy
  kAlias,        // accesses through one address, for those through another one of the same bytes
};
inline constexpr size_t kNumProxyFences = 5;

// Where a warp, an asynchronous operation, a copy engine or the host runs, which decides whether a
// scope reaches it.
struct Actor {
  uint32_t id = 0;
  uint32_t launch = 0;
  int device = 0;
  int64_t cta = -1;      // unique over all launches; -1 for a copy engine
  int64_t cluster = -1;  // unique likewise
  int warp = 0;          // index in the CTA; for an asynchronous operation, the warp that began it
  bool is_async = false;
};

class Clock {
 public:
  // The time of an actor up to which its accesses have been seen, and for each kind of fence, up to
  // which they are fenced. Clocks of many actors are joined all the time, so this is as large as a
  // vector register, and is combined as a whole.
  struct alignas(32) Seen {
    uint32_t actor = 0;
    uint32_t time = 0;
    std::array<uint32_t, kNumProxyFences> fenced{};

    void add(const Seen& other) {
      time = std::max(time, other.time);
      for (size_t i = 0; i < kNumProxyFences; ++i) fenced[i] = std::max(fenced[i], other.fenced[i]);
    }
    void keep(const Seen& other) {
      time = std::min(time, other.time);
      for (size_t i = 0; i < kNumProxyFences; ++i) fenced[i] = std::min(fenced[i], other.fenced[i]);
    }
  };

  // Everything in a launch is seen, by every proxy. CUDA does not say that the end of a launch is a
  // fence between addresses of the same memory.
  void see_launch(uint32_t launch) { add_launches({{launch, launch + 1, kEnd}}); }
  // Ends of launches stop counting as proxy fences: a flag, unlike a stream, passes on only the
  // fences that were instructions.
  void forget_fences_of_ends() {
    change_fences([](uint8_t fences) { return static_cast<uint8_t>(fences & ~kEnd); });
  }
  void see(uint32_t actor, uint32_t time) {
    Seen& seen = entry(actor);
    seen.time = std::max(seen.time, time);
  }
  void see_fenced(uint32_t actor, uint32_t time, ProxyFence fence) {
    uint32_t& fenced = entry(actor).fenced[static_cast<size_t>(fence)];
    fenced = std::max(fenced, time);
  }
  // A proxy fence: it covers all that has been seen.
  void fence(ProxyFence fence) {
    for (Seen& seen : actors_) seen.fenced[static_cast<size_t>(fence)] = seen.time;
    change_fences([&](uint8_t fences) { return static_cast<uint8_t>(fences | bit(fence)); });
  }
  void join(const Clock& other) {
    add_launches(other.launches_);
    join(actors_, other.actors_);
  }
  // Forgets actors whose launch has ended, since the launch stands for them, unless a fence after
  // them has effects that outlast it. Returns whether there were any such actors.
  template <typename IsOver>
  bool forget_actors(const IsOver& is_over) {
    bool any = false;
    std::erase_if(actors_, [&](const Seen& seen) {
      if (!is_over(seen.actor)) return false;
      any = true;
      const auto is_fenced = [&](ProxyFence fence) {
        return seen.fenced[static_cast<size_t>(fence)] != 0;
      };
      return !is_fenced(ProxyFence::kAsyncGlobal) && !is_fenced(ProxyFence::kTensormap) &&
             !is_fenced(ProxyFence::kAlias);
    });
    return any;
  }
  // Keeps only what the other clock has seen, too. Loses an actor if one of the two knows only that
  // its launch has ended; products, which call this, read what their own launch wrote.
  void meet(const Clock& other) {
    launches_ = combined<true>(launches_, other.launches_);
    meet(actors_, other.actors_);
  }
  bool has_seen(uint32_t actor, uint32_t launch, uint32_t time) const {
    if (find_launch(launch) != nullptr) return true;
    const Seen* seen = find(actor);
    return seen != nullptr && seen->time >= time;
  }
  bool has_seen_fenced(uint32_t actor, uint32_t launch, uint32_t time, ProxyFence fence) const {
    const SeenLaunches* all = find_launch(launch);
    const uint8_t enough = bit(fence) | (fence == ProxyFence::kAlias ? 0 : kEnd);
    if (all != nullptr && (all->fences & enough) != 0) return true;
    const Seen* seen = find(actor);
    return seen != nullptr && seen->fenced[static_cast<size_t>(fence)] >= time;
  }

 private:
  // Consecutive launches that have ended, from `first` to before `end`: in a long job, a clock has
  // seen thousands. The proxy fences since then, one bit for each kind and one for the end of the
  // launch, are the same for all of them.
  struct SeenLaunches {
    uint32_t first = 0;
    uint32_t end = 0;
    uint8_t fences = 0;
  };
  static constexpr uint8_t bit(ProxyFence fence) {
    return static_cast<uint8_t>(1u << static_cast<unsigned>(fence));
  }
  static constexpr uint8_t kEnd = 1u << kNumProxyFences;
  static bool ends_by(const SeenLaunches& seen, uint32_t launch) { return seen.end <= launch; }
  const SeenLaunches* find_launch(uint32_t launch) const {
    const auto place = std::lower_bound(launches_.begin(), launches_.end(), launch, ends_by);
    return place == launches_.end() || place->first > launch ? nullptr : &*place;
  }
  static void append(std::vector<SeenLaunches>& to, const SeenLaunches& more) {
    if (!to.empty() && to.back().end == more.first && to.back().fences == more.fences) {
      to.back().end = more.end;
    } else {
      to.push_back(more);
    }
  }
  template <typename Change>
  void change_fences(const Change& change) {
    std::vector<SeenLaunches> changed;
    for (const SeenLaunches& seen : launches_) {
      append(changed, {seen.first, seen.end, change(seen.fences)});
    }
    launches_ = std::move(changed);
  }
  void add_launches(const std::vector<SeenLaunches>& others) {
    const bool are_known = std::all_of(others.begin(), others.end(), [&](const auto& seen) {
      const SeenLaunches* own = find_launch(seen.first);
      return own != nullptr && own->end >= seen.end && (own->fences | seen.fences) == own->fences;
    });
    if (!are_known) launches_ = combined<false>(launches_, others);
  }
  // Returns the union of both lists and their fences or, if kOfBoth, the intersection. Works from
  // left to right, in pieces that each list has fully or not at all.
  template <bool kOfBoth>
  static std::vector<SeenLaunches> combined(const std::vector<SeenLaunches>& a,
                                            const std::vector<SeenLaunches>& b) {
    constexpr SeenLaunches kNone{UINT32_MAX, UINT32_MAX, 0};
    std::vector<SeenLaunches> result;
    auto in_a = a.begin(), in_b = b.begin();
    for (uint32_t at = 0;;) {
      while (in_a != a.end() && in_a->end <= at) ++in_a;
      while (in_b != b.end() && in_b->end <= at) ++in_b;
      if (in_a == a.end() && in_b == b.end()) return result;
      const SeenLaunches& of_a = in_a == a.end() ? kNone : *in_a;
      const SeenLaunches& of_b = in_b == b.end() ? kNone : *in_b;
      const bool a_has = of_a.first <= at, b_has = of_b.first <= at;
      const uint32_t end = std::min(a_has ? of_a.end : of_a.first, b_has ? of_b.end : of_b.first);
      if (kOfBoth ? a_has && b_has : a_has || b_has) {
        const int fences_a = a_has ? of_a.fences : 0, fences_b = b_has ? of_b.fences : 0;
        const int fences = kOfBoth ? fences_a & fences_b : fences_a | fences_b;
        append(result, {at, end, static_cast<uint8_t>(fences)});
      }
      at = end;
    }
  }
  static bool is_before(const Seen& seen, uint32_t actor) { return seen.actor < actor; }
  const Seen* find(uint32_t actor) const {
    const auto place = std::lower_bound(actors_.begin(), actors_.end(), actor, is_before);
    return place == actors_.end() || place->actor != actor ? nullptr : &*place;
  }
  Seen& entry(uint32_t actor) {
    auto place = std::lower_bound(actors_.begin(), actors_.end(), actor, is_before);
    if (place == actors_.end() || place->actor != actor) {
      place = actors_.insert(place, Seen{actor, 0, {}});
    }
    return *place;
  }
  // Adds the other's entries, combining those that both have.
  static void join(std::vector<Seen>& own, const std::vector<Seen>& other) {
    size_t at = 0, missing = 0;
    for (const Seen& entry : other) {
      while (at < own.size() && own[at].actor < entry.actor) ++at;
      if (at < own.size() && own[at].actor == entry.actor) {
        own[at].add(entry);
      } else {
        ++missing;
      }
    }
    if (missing == 0) return;
    size_t from = own.size();
    own.resize(from + missing);
    // From back to front, so each entry moves once.
    size_t to = own.size();
    for (size_t i = other.size(); from != to;) {
      const Seen& entry = other[--i];
      while (from > 0 && own[from - 1].actor > entry.actor) own[--to] = own[--from];
      own[--to] = from > 0 && own[from - 1].actor == entry.actor ? own[--from] : entry;
    }
  }
  // Keeps the entries that both have, combined.
  static void meet(std::vector<Seen>& own, const std::vector<Seen>& other) {
    size_t kept = 0;
    auto known = other.begin();
    for (const Seen& entry : own) {
      while (known != other.end() && known->actor < entry.actor) ++known;
      if (known == other.end() || known->actor != entry.actor) continue;
      own[kept] = entry;
      own[kept++].keep(*known);
    }
    own.resize(kept);
  }

  std::vector<SeenLaunches> launches_;  // that have ended, as far as the owner can know; sorted
  std::vector<Seen> actors_;            // sorted
};

// Whether an access by `from` with this scope can reach `to`.
inline bool reaches(Scope scope, const Actor& from, const Actor& to) {
  switch (scope) {
    case Scope::kNone:
      return false;
    case Scope::kCta:
      return from.cta == to.cta;
    case Scope::kCluster:
      return from.cluster == to.cluster;
    case Scope::kGpu:
      return from.device == to.device;
    case Scope::kSystem:
      return true;
  }
  return false;
}

}  // namespace axonn::gpu_machine
