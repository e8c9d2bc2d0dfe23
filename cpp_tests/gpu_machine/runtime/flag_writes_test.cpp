// The two ways to raise flags after copies: by the queue of a stream if a probe has arrived, and by
// the copy engine otherwise.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu_machine/runtime/operands.h"

namespace axonn::gpu_machine {
namespace {

using testing::Operands;
using testing::VirtualRanks;

constexpr int kRanks = 3;
constexpr int64_t kM = 12, kK = 8, kN = 8;
constexpr auto kWrite = "cuStreamWriteValue32";

RuntimeOptions with_seed(uint64_t seed) {
  RuntimeOptions options;
  options.machine.seed = seed;
  options.devices = kRanks;
  return options;
}

class FlagWrites {
 public:
  explicit FlagWrites(const RuntimeOptions& options)
      : runtime_(options), random_(options.machine.seed), ranks_(kRanks) {}

  // Runs a gather on all ranks, checks it, and returns how many value writes it has made.
  int writes_of_gather() {
    const Operands with(ranks_, kM, kK, kN, random_);
    const auto outputs = with.outputs(kM);
    testing::synchronize_all(kRanks);
    const int before = runtime_.calls_of(kWrite);
    for (int r = 0; r < kRanks; ++r) {
      const auto rank = static_cast<size_t>(r);
      ranks_.gather(r, with.shards[rank], with.bs[rank], outputs[rank], kM, kK, kN,
                    ranks_[r].compute.get());
    }
    testing::synchronize_all(kRanks);
    for (size_t r = 0; r < kRanks; ++r) EXPECT_EQ(outputs[r].read(), with.gathered[r]);
    return runtime_.calls_of(kWrite) - before;
  }

  Runtime& runtime() { return runtime_; }
  VirtualRanks& ranks() { return ranks_; }

 private:
  Runtime runtime_;
  std::mt19937_64 random_;
  VirtualRanks ranks_;
};

constexpr int kFlags = kRanks * (kRanks - 1);  // per gather

TEST(FlagWrites, FlagsOfPeersAreCopiedIfNothingWasProbed) {
  FlagWrites calls(with_seed(1));
  EXPECT_EQ(calls.writes_of_gather(), 0);
}

TEST(FlagWrites, TheQueueWritesWhereProbesArrive) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    FlagWrites calls(with_seed(seed));
    calls.ranks().probe_writes();
    for (int r = 0; r < kRanks; ++r) EXPECT_EQ(calls.ranks()[r].peers.queue_writes, 0b111u);
    EXPECT_EQ(calls.writes_of_gather(), kFlags);
    EXPECT_EQ(calls.writes_of_gather(), kFlags);
  }
}

// Calls are correct whether the driver refuses the writes or silently ignores them.
TEST(FlagWrites, FlagsAreCopiedWhereProbesDoNotArrive) {
  for (const RemoteWrites comes : {RemoteWrites::kRefused, RemoteWrites::kIgnored}) {
    RuntimeOptions options = with_seed(2);
    options.remote_writes = comes;
    FlagWrites calls(options);
    calls.ranks().probe_writes();
    EXPECT_EQ(calls.runtime().calls_of(kWrite), kFlags) << "the probes";
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(calls.ranks()[r].peers.queue_writes, uint32_t{1} << r);
    }
    EXPECT_EQ(calls.writes_of_gather(), 0);
  }
}

// One of the probes is refused, so only that flag is copied.
TEST(FlagWrites, EachPairOfRanksIsProbed) {
  FlagWrites calls(with_seed(3));
  calls.runtime().fail(kWrite, cudaErrorNotSupported, 1);  // from rank 0 to rank 2
  calls.ranks().probe_writes();
  EXPECT_EQ(calls.ranks()[0].peers.queue_writes, 0b011u);
  EXPECT_EQ(calls.ranks()[1].peers.queue_writes, 0b111u);
  EXPECT_EQ(calls.ranks()[2].peers.queue_writes, 0b111u);
  EXPECT_EQ(calls.writes_of_gather(), kFlags - 1);
}

// NVIDIA does not support such writes from CUDA 13.1 on, so there they are not even probed.
TEST(FlagWrites, ADriverThatDoesNotSupportThemIsNotAsked) {
  for (const int driver : {13000, 13010, 14000}) {
    RuntimeOptions options = with_seed(4);
    options.driver_version = driver;
    FlagWrites calls(options);
    calls.ranks().probe_writes();
    const bool asks = driver < 13010;
    EXPECT_EQ(calls.runtime().calls_of(kWrite), asks ? kFlags : 0);
    EXPECT_EQ(calls.writes_of_gather(), asks ? kFlags : 0);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
