// Thousands of calls, back to back, without barriers and at random speeds. Every bit that a rank
// reads is checked, which shows if a half is overwritten or read too early.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/numeric/reduce.h"
#include "core/ranks/errors.h"
#include "core/schedule/partition.h"
#include "core/symmetric/symmetric_group.h"
#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using kernels::DataType;
using kernels::ReduceOp;
using testing::error_of;
using testing::expect_contains;
using testing::expect_success;
using testing::group_options;
using testing::Launch;
using testing::run_group;

constexpr int64_t kMaxShard = 1500;  // in elements; more than a block of reduce_slots
constexpr int64_t kMaxChunks = 4;

// Ranks are slow in different places: usually not at all, sometimes for longer than a wait spins,
// and rarely for longer than all of its yields.
class RandomDelays {
 public:
  explicit RandomDelays(int64_t rank) : rng_(static_cast<uint64_t>(977 * rank + 1)) {}
  void operator()() {
    const auto dice = rng_() % 256;
    if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng_() % 500));
    if (dice < 16) std::this_thread::yield();
  }

 private:
  std::mt19937_64 rng_;
};

// The value that `rank` sends in `call` at `index`: a hash, exact in fp32 so that sums are exact.
float element(int64_t rank, int64_t call, int64_t index) {
  uint64_t word = static_cast<uint64_t>(rank + 16 * (call + 4096 * index)) * 0x9E3779B97F4A7C15u;
  word ^= word >> 29;
  return static_cast<float>(word * 0xBF58476D1CE4E5B9u >> 46);
}

void expect_equal(float got, float expected, const char* what, int64_t call, int64_t peer) {
  if (got == expected) return;
  throw std::runtime_error(std::string(what) + " " + std::to_string(call) + ", rank " +
                           std::to_string(peer) + ": " + std::to_string(got) + " instead of " +
                           std::to_string(expected));
}

// Every rank's shard, sent in chunks with one flag each.
void all_gather(SymmetricGroup& group, int64_t number, int64_t count, RandomDelays& delay) {
  Call call(group, CallSignature::of("all_gather", {number, count}), count * 4);
  auto* own = reinterpret_cast<float*>(call.workspace());
  for (int64_t chunk = 0; chunk < kMaxChunks; ++chunk) {
    delay();
    const auto range = part_of(count, kMaxChunks, chunk);
    for (int64_t i = range.begin; i < range.end; ++i) own[i] = element(group.rank(), number, i);
    call.signal(chunk);
  }
  for (int64_t step = 0; step < group.size(); ++step) {
    const int64_t peer = own_first(group.rank(), group.size(), step);
    const auto* theirs = reinterpret_cast<const float*>(call.workspace_of(peer));
    for (int64_t chunk = 0; chunk < kMaxChunks; ++chunk) {
      call.wait(peer, chunk);
      delay();
      const auto range = part_of(count, kMaxChunks, chunk);
      for (int64_t i = range.begin; i < range.end; ++i) {
        expect_equal(theirs[i], element(peer, number, i), "all_gather", number, peer);
      }
    }
  }
}

// One slot and one flag per destination; the slots of all sources are summed in rank order.
void reduce_scatter(SymmetricGroup& group, int64_t number, int64_t count, RandomDelays& delay) {
  Call call(group, CallSignature::of("reduce_scatter", {number, count}), group.size() * count * 4);
  const int64_t rank = group.rank();
  auto* slots = reinterpret_cast<float*>(call.workspace());
  for (int64_t step = 0; step < group.size(); ++step) {
    const int64_t destination = own_last(rank, group.size(), step);
    delay();
    for (int64_t i = 0; i < count; ++i) {
      slots[destination * count + i] = element(rank, number, destination * count + i);
    }
    call.signal(destination);
  }
  std::vector<const void*> sources;
  for (int64_t source = 0; source < group.size(); ++source) {
    call.wait(source, rank);
    sources.push_back(reinterpret_cast<const float*>(call.workspace_of(source)) + rank * count);
  }
  delay();
  std::vector<float> sum(static_cast<size_t>(count));
  kernels::reduce_slots(sum.data(), sources.data(), group.size(), count, DataType::kFloat32,
                        ReduceOp::kSum);
  for (int64_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int64_t peer = 0; peer < group.size(); ++peer) {
      expected += element(peer, number, rank * count + i);
    }
    expect_equal(sum[static_cast<size_t>(i)], expected, "reduce_scatter", number, rank);
  }
}

// All ranks read `root`'s data. The root waits for nobody and may run ahead; no one else writes.
void broadcast(SymmetricGroup& group, int64_t number, int64_t count, RandomDelays& delay) {
  const int64_t root = number / 16 % group.size();
  const bool is_root = group.rank() == root;
  Call call(group, CallSignature::of("broadcast", {number, count}), is_root ? count * 4 : 0);
  if (is_root) {
    auto* own = reinterpret_cast<float*>(call.workspace());
    for (int64_t i = 0; i < count; ++i) own[i] = element(root, number, i);
    call.signal(2);
    return;
  }
  delay();
  call.wait(root, 2);
  const auto* theirs = reinterpret_cast<const float*>(call.workspace_of(root));
  for (int64_t i = 0; i < count; ++i) {
    expect_equal(theirs[i], element(root, number, i), "broadcast", number, root);
  }
}

// Each rank reads its right neighbor's data; no data keeps it from overtaking its left neighbor.
void shift(SymmetricGroup& group, int64_t number, int64_t count, RandomDelays& delay) {
  Call call(group, CallSignature::of("shift", {number, count}), count * 4);
  auto* own = reinterpret_cast<float*>(call.workspace());
  for (int64_t i = 0; i < count; ++i) own[i] = element(group.rank(), number, i);
  call.signal(0);
  delay();
  const int64_t peer = own_last(group.rank(), group.size(), 0);
  call.wait(peer, 0);
  delay();
  const auto* theirs = reinterpret_cast<const float*>(call.workspace_of(peer));
  for (int64_t i = 0; i < count; ++i) {
    expect_equal(theirs[i], element(peer, number, i), "shift", number, peer);
  }
}

// The same kinds and sizes on every rank. Each of the first two kinds is a barrier; in the others,
// only the wait for a free half keeps fast ranks from overwriting what slow ones read.
void traffic(SymmetricGroup& group, int64_t num_calls) {
  constexpr std::array kKinds = {all_gather, reduce_scatter, broadcast, shift};
  std::mt19937_64 rng(42);
  RandomDelays delay(group.rank());
  for (int64_t number = 0; number < num_calls; ++number) {
    const auto choice = rng();
    // Mostly small ones, for which the ranks follow each other most closely.
    const int64_t limit = choice % 8 == 0 ? kMaxShard : 40;
    const auto count = static_cast<int64_t>(rng() % static_cast<uint64_t>(limit + 1));
    // A run of one kind lets ranks drift apart as far as they can.
    const size_t kind = choice % 64 < 32 ? static_cast<size_t>(number / 32 % 4) : choice / 64 % 4;
    kKinds[kind](group, number, count, delay);
  }
}

class Traffic : public ::testing::TestWithParam<std::tuple<Launch, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Traffic,
                         ::testing::Combine(::testing::Values(Launch::kThreads, Launch::kProcesses),
                                            ::testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& test) {
                           return testing::to_string(std::get<0>(test.param)) +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(Traffic, TwoThousandCallsBackToBack) {
  const auto [launch, size] = GetParam();
  expect_success(
      run_group(launch, group_options(size), [](SymmetricGroup& group) { traffic(group, 2000); }));
}

class EpochTraffic : public ::testing::TestWithParam<Epoch> {};
INSTANTIATE_TEST_SUITE_P(FirstEpoch, EpochTraffic,
                         ::testing::Values((Epoch{1} << 30) - 150,  // the flags are renewed
                                           (Epoch{1} << 31) - 150,  // the sign bit is set
                                           Epoch{0} - 150));        // and all bits wrap to 0

TEST_P(EpochTraffic, GoesOnAcrossTheEdge) {
  for (const auto launch : {Launch::kThreads, Launch::kProcesses}) {
    for (const int64_t size : {1, 3}) {
      auto options = group_options(size);
      options.first_epoch = GetParam();
      expect_success(
          run_group(launch, options, [](SymmetricGroup& group) { traffic(group, 300); }));
    }
  }
}

// Flags that no rank has raised yet count as the previous call's, though 0 would lie ahead.
TEST(EpochTrafficErrors, AGroupThatBeginsLateWaitsForEveryFlag) {
  auto options = group_options(2);
  options.first_epoch = Epoch{0} - 150;
  options.timeout = std::chrono::milliseconds(100);
  auto groups = SymmetricGroup::of_threads(options);
  const auto signature = CallSignature::of("late", {});
  const Call silent(*groups[1], signature, 0);
  const auto error = error_of([&] { Call(*groups[0], signature, 0).wait(1, 7); });
  expect_contains(error, {"late: rank 0", "has not delivered its part"});
}

// A failure must also be seen in the very call numbered 0. The peer that broke its call lives on,
// with its group, so only the call can have told.
TEST(EpochTrafficErrors, AFailureInTheCallNumberedZeroIsSeen) {
  auto options = group_options(2);
  options.first_epoch = Epoch{0} - 2;
  std::atomic<bool> through = false;
  const auto outcomes = run_group(Launch::kThreads, options, [&](SymmetricGroup& group) {
    {
      const Call call(group, CallSignature::of("first", {}), 0);
    }
    if (group.rank() == 1) {
      error_of([&] {
        const Call call(group, CallSignature::of("zero", {}), 0);
        throw std::runtime_error("on purpose");
      });
      while (!through) std::this_thread::yield();
      return;
    }
    const auto error = error_of([&] {
      Call call(group, CallSignature::of("zero", {}), 0);
      call.wait(1, 0);
    });
    through = true;
    expect_contains(error, {"zero: rank 0 waited for rank 1", "failed"});
  });
  expect_success(outcomes);
}

// Every 2^30 calls a rank raises the flags that it has not used lately, so that they do not seem to
// lie ahead. It raises them to the previous call's epoch, so no wait of the new call may end early.
// A waiter still in the previous call (for a signal that never came, a bug of its op) gets through,
// and that is how this test sees the renewal.
TEST(EpochRenewal, RaisesUnusedFlagsToTheCallBefore) {
  auto options = group_options(2);
  options.first_epoch = (Epoch{1} << 30) - 2;
  options.timeout = std::chrono::seconds(2);
  std::atomic<bool> through = false;
  expect_success(run_group(Launch::kThreads, options, [&](SymmetricGroup& group) {
    if (group.rank() == 0) {
      {
        const Call before(group, CallSignature::of("before", {}), 0);
      }
      const Call renewal(group, CallSignature::of("renewal", {}), 0);
      while (!through) std::this_thread::yield();
      return;
    }
    const auto error = error_of([&] {
      {
        Call before(group, CallSignature::of("before", {}), 0);
        for (const int64_t flag : {int64_t{0}, int64_t{7}, SymmetricGroup::kNumFlags - 1}) {
          before.wait(0, flag);
        }
      }
      Call renewal(group, CallSignature::of("renewal", {}), 0);
      renewal.wait(0, 7);
    });
    through = true;
    expect_contains(error, {"renewal: rank 1", "has not delivered its part"});
  }));
}

}  // namespace
}  // namespace axonn::comm
