// Emulated links: how long transfers take, one after another, and that all ranks agree on it.
#include "core/emulation/emulated_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using testing::expect_contains;
using testing::expect_success;
using testing::InMemoryStore;
using testing::run_processes;
using testing::run_threads;
using testing::SharedArray;
using testing::Timer;

constexpr double kSpeed = 1e6;  // bytes per second: a kilobyte takes a millisecond
constexpr double kExact = 1e-9;

double seconds(EmulatedLink::Time time) { return time.time_since_epoch().count(); }

double now() { return seconds(std::chrono::steady_clock::now()); }

std::unique_ptr<EmulatedLink> meet(InMemoryStore& store, int64_t rank, int64_t size) {
  return EmulatedLink::rendezvous(
      {.name = "x", .rank = rank, .size = size, .bytes_per_second = kSpeed}, store);
}

// The real collective: returns once all ranks have arrived.
void gather(InMemoryStore& store, const std::string& name, int64_t size) {
  store.add(name, 1);
  while (store.add(name, 0) < size) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

TEST(EmulatedLink, LastsAsLongAsItsBytesFromTheLastArrivalOnOnEveryRank) {
  constexpr int64_t kSize = 3;
  InMemoryStore store;
  const SharedArray<double> comes(kSize), came(kSize), ended(kSize), left(kSize);
  expect_success(run_processes(kSize, [&](int64_t rank) {
    const auto link = meet(store, rank, kSize);
    gather(store, "met", kSize);
    std::this_thread::sleep_for(std::chrono::milliseconds(15 * rank));
    comes[rank] = now();
    const auto transfer = link->begin(30'000);
    came[rank] = now();
    gather(store, "moved", kSize);
    ended[rank] = seconds(link->end(transfer));
    left[rank] = now();
  }));
  for (int64_t rank = 0; rank < kSize; ++rank) {
    EXPECT_EQ(ended[rank], ended[0]);
    EXPECT_GE(left[rank], ended[rank]);
  }
  // The last arrival that the link recorded lies between these two bounds.
  EXPECT_GE(ended[0], std::max({comes[0], comes[1], comes[2]}) + 0.030 - kExact);
  EXPECT_LE(ended[0], std::max({came[0], came[1], came[2]}) + 0.030 + kExact);
}

TEST(EmulatedLink, ServesOneTransferAtATimeInTheOrderOfTheirStart) {
  InMemoryStore store;
  const auto link = meet(store, 0, 1);
  double last = 0, between = 0, start = 0, begun = 1;
  while (begun >
         start) {  // retry if a busy machine has begun the others only after the first one's end
    const auto first = link->begin(10'000), second = link->begin(20'000), third = link->begin(0);
    begun = now();
    last = seconds(link->end(third));  // the order of waits does not matter
    between = seconds(link->end(second));
    start = seconds(link->end(first));
  }
  EXPECT_NEAR(between - start, 0.020, kExact);
  EXPECT_NEAR(last - between, 0, kExact);
  // After an idle time, the next transfer starts as soon as it is begun.
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const double began = now();
  EXPECT_GE(seconds(link->end(link->begin(1000))), began + 0.001);
}

TEST(EmulatedLink, WhatIsDoneBetweenStartAndEndIsHidden) {
  InMemoryStore store;
  const auto link = meet(store, 0, 1);
  const auto transfer = link->begin(20'000);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const double before = now();
  EXPECT_LT(seconds(link->end(transfer)), before);
}

TEST(EmulatedLink, RefusesWhatIsNotUnderWay) {
  InMemoryStore store;
  const auto link = meet(store, 0, 1);
  EXPECT_THROW(link->end(0), std::logic_error);
  const auto transfer = link->begin(1);
  link->end(transfer);
  EXPECT_THROW(link->end(transfer), std::logic_error);
}

TEST(EmulatedLink, RefusesRanksOfSeveralHosts) {
  InMemoryStore store;
  const auto outcomes = run_threads(2, [&](int64_t rank) {
    EmulatedLink::rendezvous({.name = "data (ranks 0, 1)",
                              .rank = rank,
                              .size = 2,
                              .bytes_per_second = kSpeed,
                              .host = "host" + std::to_string(rank)},
                             store);
  });
  for (const auto& outcome : outcomes) {
    expect_contains(outcome.error, {"data (ranks 0, 1)", "not on one host"});
  }
}

}  // namespace
}  // namespace axonn::comm
