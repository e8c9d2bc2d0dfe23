// Checks the launches that clocks have seen against a list with one entry per launch.
#include "gpu_machine/clock.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kLaunches = 40;
constexpr uint32_t kNobody = 1;  // an actor that no clock has seen
constexpr std::array kFences = {ProxyFence::kAsyncGlobal, ProxyFence::kTensormap,
                                ProxyFence::kAlias};

// What is known of a launch: the fence instructions since then, and whether its end was a fence.
struct Known {
  std::set<ProxyFence> fences;
  bool by_end = false;

  bool has(ProxyFence kind) const {
    return fences.contains(kind) || (by_end && kind != ProxyFence::kAlias);
  }
};

// A clock, and for each launch what the clock should know.
struct Pair {
  Clock clock;
  std::map<uint32_t, Known> known;

  void see(uint32_t launch) {
    clock.see_launch(launch);
    known[launch].by_end = true;
  }
  void fence(ProxyFence kind) {
    clock.fence(kind);
    for (auto& [launch, of_it] : known) of_it.fences.insert(kind);
  }
  void forget_ends() {
    clock.forget_fences_of_ends();
    for (auto& [launch, of_it] : known) of_it.by_end = false;
  }
  void join(const Pair& other) {
    clock.join(other.clock);
    for (const auto& [launch, more] : other.known) {
      Known& own = known[launch];
      own.fences.insert(more.fences.begin(), more.fences.end());
      own.by_end |= more.by_end;
    }
  }
  void meet(const Pair& other) {
    clock.meet(other.clock);
    std::erase_if(known, [&](const auto& one) { return !other.known.contains(one.first); });
    for (auto& [launch, own] : known) {
      const Known& more = other.known.at(launch);
      std::erase_if(own.fences, [&](ProxyFence kind) { return !more.fences.contains(kind); });
      own.by_end &= more.by_end;
    }
  }
  void expect_the_same() const {
    for (uint32_t launch = 0; launch <= kLaunches; ++launch) {
      const auto own = known.find(launch);
      EXPECT_EQ(clock.has_seen(kNobody, launch, 1), own != known.end()) << launch;
      for (const ProxyFence kind : kFences) {
        EXPECT_EQ(clock.has_seen_fenced(kNobody, launch, 1, kind),
                  own != known.end() && own->second.has(kind))
            << launch;
      }
    }
  }
};

TEST(Clock, LaunchesAreThoseOfEachByItself) {
  std::mt19937 random(7);
  const auto draw = [&](uint32_t below) { return static_cast<uint32_t>(random() % below); };
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    std::vector<Pair> pairs(4);
    for (int step = 0; step < 60; ++step) {
      Pair& one = pairs[draw(4)];
      const Pair& other = pairs[draw(4)];
      const uint32_t what = draw(16);
      if (what < 9) {
        one.see(1 + draw(kLaunches - 1));
      } else if (what < 12) {
        one.join(other);
      } else if (what == 12) {
        one.meet(other);
      } else if (what == 13) {
        one.forget_ends();
      } else {
        one.fence(kFences[draw(kFences.size())]);
      }
      one.expect_the_same();
    }
  }
}

// Actors are forgotten when their launch ends, unless they are covered by a fence of their own.
TEST(Clock, FencesOfActorsOutliveTheirLaunch) {
  constexpr uint32_t kLaunch = 5, kFenced = 7, kUnfenced = 8;
  Clock clock;
  clock.see(kFenced, 1);
  clock.fence(ProxyFence::kAsyncGlobal);
  clock.see(kFenced, 2);
  clock.see(kUnfenced, 1);
  EXPECT_TRUE(clock.forget_actors([](uint32_t) { return true; }));
  clock.see_launch(kLaunch);
  const auto fenced = [&](uint32_t actor, uint32_t time) {
    return clock.has_seen_fenced(actor, kLaunch, time, ProxyFence::kAsyncGlobal);
  };
  EXPECT_TRUE(fenced(kFenced, 2) && fenced(kUnfenced, 1));  // the end is a fence
  clock.forget_fences_of_ends();
  EXPECT_TRUE(clock.has_seen(kFenced, kLaunch, 2) && clock.has_seen(kUnfenced, kLaunch, 1));
  EXPECT_TRUE(fenced(kFenced, 1));
  EXPECT_FALSE(fenced(kFenced, 2));
  EXPECT_FALSE(fenced(kUnfenced, 1));
  clock.fence(ProxyFence::kAsyncGlobal);
  EXPECT_TRUE(fenced(kFenced, 2) && fenced(kUnfenced, 1));
}

}  // namespace
}  // namespace axonn::gpu_machine
