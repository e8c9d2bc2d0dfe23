// What NCCL forbids, and what it does not promise: each case ends the machine with an error that
// says who did what, or is refused with NCCL's own code.
#include <gtest/gtest.h>

#include <functional>

#include "gpu_machine/runtime/nccl/nccl_ranks.h"

namespace axonn::gpu_machine::nccl {
namespace {

using testing::Array;
using testing::DeviceGuard;
using testing::expect_failure;
using testing::HighPriorityStream;
using testing::Ranks;
using testing::with_seed;
using Kind = MachineError::Kind;

constexpr uint64_t kSeeds = 10;

// Two ranks, each with an array that nobody has written, and one that is written.
struct Pair {
  Pair() : comms(2) {
    for (int r = 0; r < 2; ++r) {
      const DeviceGuard guard(r);
      written.emplace_back(std::vector<float>(8, static_cast<float>(r)));
      unwritten.emplace_back(size_t{16});
    }
  }
  ncclResult_t gather(int r, ncclComm_t comm, cudaStream_t stream, size_t count = 8) {
    const auto at = static_cast<size_t>(r);
    return ncclAllGather(written[at].data(), unwritten[at].data(), count, ncclFloat32, comm,
                         stream);
  }
  ncclResult_t gather(int r) { return gather(r, comms[r], comms.stream(r)); }

  Ranks comms;
  std::vector<Array<float>> written, unwritten;
};

// --- Calls that do not fit each other ---------------------------------------------

struct Mismatch {
  const char* name;
  std::function<void(Pair&)> second;  // what rank 1 calls while rank 0 gathers 8 float32
  const char* told;
};

class Mismatches : public ::testing::TestWithParam<Mismatch> {};

TEST_P(Mismatches, AreToldByBothCalls) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed, 2));
    Pair pair;
    EXPECT_EQ(pair.gather(0), ncclSuccess);
    GetParam().second(pair);
    testing::run_to_the_end(2);
    expect_failure(runtime, Kind::kMisuse,
                   {"all_gather of 8 float32", GetParam().told, "rank 0 calls", "rank 1 calls"});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, Mismatches,
    ::testing::Values(Mismatch{"Count",
                               [](Pair& p) { (void)p.gather(1, p.comms[1], p.comms.stream(1), 4); },
                               "all_gather of 4 float32"},
                      Mismatch{"Dtype",
                               [](Pair& p) {
                                 (void)ncclAllGather(p.written[1].data(), p.unwritten[1].data(), 8,
                                                     ncclInt32, p.comms[1], p.comms.stream(1));
                               },
                               "all_gather of 8 int32"},
                      Mismatch{"Kind",
                               [](Pair& p) {
                                 (void)ncclAllReduce(p.written[1].data(), p.unwritten[1].data(), 8,
                                                     ncclFloat32, ncclSum, p.comms[1],
                                                     p.comms.stream(1));
                               },
                               "all_reduce(sum) of 8 float32"},
                      Mismatch{"Group",
                               [](Pair& p) {
                                 (void)ncclGroupStart();
                                 (void)p.gather(1);
                                 (void)p.gather(1);
                                 (void)ncclGroupEnd();
                               },
                               "all_gather of 8 float32, all_gather of 8 float32"}),
    [](const auto& tested) { return tested.param.name; });

TEST(NcclRules, EndsOfATransferHaveEqualCounts) {
  Runtime runtime(with_seed(1, 2));
  Pair pair;
  (void)ncclSend(pair.written[0].data(), 8, ncclFloat32, 1, pair.comms[0], pair.comms.stream(0));
  (void)ncclRecv(pair.unwritten[1].data(), 9, ncclFloat32, 0, pair.comms[1], pair.comms.stream(1));
  (void)cudaDeviceSynchronize();
  expect_failure(runtime, Kind::kMisuse, {"send of 8 float32 to rank 1", "receive of 9 float32"});
}

TEST(NcclRules, TransfersToOneselfArePairedInTheirGroup) {
  Runtime runtime(with_seed(1, 2));
  Pair pair;
  EXPECT_EQ(
      ncclSend(pair.written[0].data(), 8, ncclFloat32, 0, pair.comms[0], pair.comms.stream(0)),
      ncclInvalidUsage);
  EXPECT_EQ(
      ncclSend(pair.written[0].data(), 8, ncclFloat32, 2, pair.comms[0], pair.comms.stream(0)),
      ncclInvalidArgument);
  EXPECT_FALSE(runtime.failure());
}

// --- Deadlocks --------------------------------------------------------------------

TEST(NcclRules, ARankThatDoesNotComeIsNamed) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed, 2));
    Pair pair;
    EXPECT_EQ(pair.gather(1), ncclSuccess);
    const DeviceGuard guard(1);
    EXPECT_NE(cudaStreamSynchronize(pair.comms.stream(1)), cudaSuccess);
    expect_failure(runtime, Kind::kDeadlock, {"communicator 1 on rank 1", "waits for rank 0"});
  }
}

// Each rank has two communicators and calls them one after the other on one stream.
TEST(NcclRules, AnotherOrderOfTwoCommunicatorsIsADeadlock) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed, 2));
    Pair pair;
    const Ranks others(2);
    for (int r = 0; r < 2; ++r) {
      for (const bool first : {r == 0, r == 1}) {
        EXPECT_EQ(pair.gather(r, first ? pair.comms[r] : others[r], pair.comms.stream(r)),
                  ncclSuccess);
      }
    }
    (void)cudaStreamSynchronize(pair.comms.stream(0));
    expect_failure(runtime, Kind::kDeadlock,
                   {"communicator 1 on rank 0", "waits for rank 1", "communicator 2 on rank 1",
                    "waits for rank 0"});
  }
}

// The same on separate streams: it depends on whether both fit on the SMs at a time.
TEST(NcclRules, CommunicatorsSideBySideNeedTheirSms) {
  int deadlocks = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const int resident : {4, 8}) {
      Runtime runtime(with_seed(seed, 2, resident));
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.minCTAs = config.maxCTAs = 4;
      const Ranks some(2, &config), others(2, &config);
      std::vector<Array<float>> outputs, inputs;
      for (int r = 0; r < 2; ++r) {
        const DeviceGuard guard(r);
        inputs.emplace_back(std::vector<float>(64, 1));
        for (const bool first : {r == 0, r == 1}) {
          const Ranks& comms = first ? some : others;
          outputs.emplace_back(size_t{128});
          EXPECT_EQ(ncclAllGather(inputs.back().data(), outputs.back().data(), 64, ncclFloat32,
                                  comms[r], comms.stream(r)),
                    ncclSuccess);
        }
      }
      testing::run_to_the_end(2);
      if (resident == 8) {
        EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
      } else if (runtime.failure()) {
        ++deadlocks;
        expect_failure(runtime, Kind::kDeadlock, {"has no SM for 4 CTAs"});
      }
    }
  }
  EXPECT_GT(deadlocks, 0);
}

TEST(NcclRules, AnInitializationWaitsForAllRanks) {
  Runtime runtime(with_seed(1, 2));
  ncclUniqueId id;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 0), ncclUnhandledCudaError);
  expect_failure(runtime, Kind::kDeadlock, {"waits for the others of communicator 1"});
}

// --- Memory -----------------------------------------------------------------------

TEST(NcclRules, MemoryIsChecked) {
  struct Case {
    std::function<void(Pair&)> calls;
    Kind kind;
    const char* told;
  };
  const std::vector<Case> cases = {
      // Rank 0's output is read on another stream, which does not wait.
      {[](Pair& p) {
         (void)p.gather(0);
         (void)p.gather(1);
         const HighPriorityStream other;
         (void)cudaMemcpyAsync(p.written[0].data(), p.unwritten[0].data(), 32,
                               cudaMemcpyDeviceToDevice, other.get());
       },
       Kind::kRace, "nothing orders"},
      // Rank 1's input is overwritten in the meantime.
      {[](Pair& p) {
         const DeviceGuard guard(1);
         const HighPriorityStream other;
         (void)p.gather(0);
         (void)p.gather(1);
         (void)cudaMemsetAsync(p.written[1].data(), 0, 32, other.get());
       },
       Kind::kRace, "nothing orders"},
      {[](Pair& p) {
         for (int r = 0; r < 2; ++r) {
           const auto at = static_cast<size_t>(r);
           (void)ncclAllReduce(p.unwritten[at].data(), p.unwritten[at].data(), 8, ncclFloat32,
                               ncclSum, p.comms[r], p.comms.stream(r));
         }
       },
       Kind::kMemory, "nobody has written"},
      {[](Pair& p) {
         for (int r = 0; r < 2; ++r) {
           const auto at = static_cast<size_t>(r);
           (void)ncclAllGather(p.written[at].data(), p.unwritten[at].data() + 1, 8, ncclFloat32,
                               p.comms[r], p.comms.stream(r));
         }
       },
       Kind::kMemory, "outside an allocation"}};
  for (const Case& one : cases) {
    int found = 0;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      Runtime runtime(with_seed(seed, 2));
      Pair pair;
      one.calls(pair);
      testing::run_to_the_end(2);
      // If the copy comes first, it reads what nobody has written.
      if (one.kind == Kind::kRace && runtime.failure() &&
          runtime.failure()->kind() == Kind::kMemory) {
        continue;
      }
      expect_failure(runtime, one.kind, {one.told});
      ++found;
    }
    EXPECT_GT(found, 0) << one.told;
  }
}

TEST(NcclRules, InputAndOutputOverlapOnlyInPlace) {
  Runtime runtime(with_seed(1, 2));
  Pair pair;
  EXPECT_EQ(ncclAllGather(pair.unwritten[0].data() + 4, pair.unwritten[0].data(), 8, ncclFloat32,
                          pair.comms[0], pair.comms.stream(0)),
            ncclInvalidUsage);
  expect_failure(runtime, Kind::kMisuse, {"all_gather of 8 float32", "overlap"});
}

// --- The life of communicators ----------------------------------------------------

TEST(NcclRules, WhatIsDestroyedIsNotUsed) {
  Runtime runtime(with_seed(1, 2));
  Pair pair;
  EXPECT_EQ(ncclCommDestroy(pair.comms[0]), ncclSuccess);
  EXPECT_EQ(pair.gather(0), ncclInvalidUsage);
  expect_failure(runtime, Kind::kMisuse,
                 {"ncclAllGather of communicator 1 on rank 0", "destroyed"});
}

TEST(NcclRules, ConfigurationsAreChecked) {
  Runtime runtime(with_seed(1, 1));
  const auto refused = [](auto change) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    change(config);
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ncclComm_t comm = nullptr;
    return ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument;
  };
  EXPECT_FALSE(refused([](ncclConfig_t&) {}));
  EXPECT_FALSE(refused([](ncclConfig_t& c) { c.cgaClusterSize = 0; }));
  EXPECT_TRUE(refused([](ncclConfig_t& c) { c.magic = 0; }));
  EXPECT_TRUE(refused([](ncclConfig_t& c) { c.blocking = 2; }));
  EXPECT_TRUE(refused([](ncclConfig_t& c) { c.maxCTAs = 0; }));
  EXPECT_TRUE(refused([](ncclConfig_t& c) { c.minCTAs = 5, c.maxCTAs = 4; }));
  EXPECT_TRUE(refused([](ncclConfig_t& c) { c.cgaClusterSize = 9; }));
}

// Ranks are ordered by their keys within a color; one rank takes no part.
TEST(NcclRules, ASplitOrdersRanksByKey) {
  Runtime runtime(with_seed(3, 3));
  const Ranks comms(3);
  ncclComm_t parts[3] = {};
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(ncclCommSplit(comms[r], r == 1 ? NCCL_SPLIT_NOCOLOR : 0, -r, &parts[r], nullptr),
              ncclSuccess);
  }
  ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_EQ(parts[1], nullptr);
  for (const int r : {0, 2}) {
    int rank = -1, count = 0;
    EXPECT_EQ(ncclCommUserRank(parts[r], &rank), ncclSuccess);
    EXPECT_EQ(ncclCommCount(parts[r], &count), ncclSuccess);
    EXPECT_EQ(rank, r == 2 ? 0 : 1);
    EXPECT_EQ(count, 2);
  }
}

// --- Communicators that do not block ----------------------------------------------

// A thread of NCCL launches the call some time later. Until then the stream may seem idle.
TEST(NcclRules, ACallThatDoesNotBlockIsEnqueuedLater) {
  int over_too_early = 0;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed, 1));
    const Ranks comms(1, &config);
    const Array<float> input(std::vector<float>(4, 1)), output(size_t{4});
    EXPECT_EQ(ncclAllReduce(input.data(), output.data(), 4, ncclFloat32, ncclSum, comms[0],
                            comms.stream(0)),
              ncclInProgress);
    if (cudaStreamQuery(comms.stream(0)) == cudaSuccess) ++over_too_early;
    const ncclResult_t again = ncclAllReduce(input.data(), output.data(), 4, ncclFloat32, ncclSum,
                                             comms[0], comms.stream(0));
    EXPECT_TRUE(again == ncclInvalidArgument || again == ncclInProgress);
    comms.settle(0);
    EXPECT_EQ(cudaStreamSynchronize(comms.stream(0)), cudaSuccess);
    EXPECT_EQ(output.read(), std::vector<float>(4, 1));
  }
  EXPECT_GT(over_too_early, 0);
}

TEST(NcclRules, AGroupHasOneKindOfCommunicators) {
  Runtime runtime(with_seed(1, 1));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const Ranks one(1, &config), other(1);
  const Array<float> data(std::vector<float>(4, 1));
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  for (const Ranks* ranks : {&one, &other}) {
    EXPECT_EQ(ncclAllReduce(data.data(), data.data(), 4, ncclFloat32, ncclSum, (*ranks)[0],
                            one.stream(0)),
              ncclSuccess);
  }
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
}

// --- Aborts -----------------------------------------------------------------------

TEST(NcclRules, AnAbortEndsKernelsAndSomePeersNotice) {
  int noticed = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Runtime runtime(with_seed(seed, 2));
    Pair pair;
    EXPECT_EQ(pair.gather(0), ncclSuccess);
    EXPECT_EQ(ncclCommAbort(pair.comms[0]), ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(pair.comms.stream(0)), cudaSuccess);
    ncclResult_t state = ncclSuccess;
    for (int i = 0; i < 5; ++i) (void)ncclCommGetAsyncError(pair.comms[1], &state);
    if (state == ncclRemoteError) {
      ++noticed;
      EXPECT_EQ(pair.gather(1), ncclRemoteError);
    }
    EXPECT_EQ(ncclCommAbort(pair.comms[1]), ncclSuccess);
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
  EXPECT_GT(noticed, 0);
  EXPECT_LT(noticed, 20);
}

// The second communicator's kernel is ahead of the first one's. An abort waits for its own kernels,
// so several communicators must be aborted in a group.
TEST(NcclRules, AbortsOneAfterTheOtherWaitForWhatIsNotAbortedYet) {
  for (const bool grouped : {false, true}) {
    Runtime runtime(with_seed(1, 2));
    Pair pair;
    const Ranks others(2);
    EXPECT_EQ(pair.gather(0, others[0], pair.comms.stream(0)), ncclSuccess);
    EXPECT_EQ(pair.gather(0), ncclSuccess);
    if (grouped) (void)ncclGroupStart();
    (void)ncclCommAbort(pair.comms[0]);
    (void)ncclCommAbort(others[0]);
    if (grouped) {
      EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
      EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
    } else {
      expect_failure(runtime, Kind::kDeadlock, {"ncclCommAbort of communicator 1 on rank 0"});
    }
  }
}

// --- Graphs -----------------------------------------------------------------------

struct Captured {
  Captured() {
    for (int r = 0; r < 2; ++r) {
      const DeviceGuard guard(r);
      cudaStream_t stream = pair.comms.stream(r);
      cudaGraph_t graph = nullptr;
      AXONN_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      EXPECT_EQ(pair.gather(r), ncclSuccess);
      AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      AXONN_CUDA_CHECK(cudaGraphInstantiate(&graphs[r], graph, 0));
      AXONN_CUDA_CHECK(cudaGraphDestroy(graph));
    }
  }
  Pair pair;
  cudaGraphExec_t graphs[2] = {};
};

// Replays and other calls of a communicator run in the order of their launches, on whatever
// streams.
TEST(NcclRules, ReplaysAreOrderedWithOtherCalls) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed, 2));
    Captured captured;
    Pair& pair = captured.pair;
    std::vector<Array<float>> sums;
    for (int r = 0; r < 2; ++r) {
      const DeviceGuard guard(r);
      sums.emplace_back(size_t{8});
      const HighPriorityStream other;
      AXONN_CUDA_CHECK(cudaGraphLaunch(captured.graphs[r], pair.comms.stream(r)));
      EXPECT_EQ(ncclAllReduce(pair.written[static_cast<size_t>(r)].data(), sums.back().data(), 8,
                              ncclFloat32, ncclSum, pair.comms[r], other.get()),
                ncclSuccess);
      AXONN_CUDA_CHECK(cudaGraphLaunch(captured.graphs[r], pair.comms.stream(r)));
    }
    testing::synchronize(2);
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(sums[static_cast<size_t>(r)].read(), std::vector<float>(8, 1));
      EXPECT_EQ(pair.unwritten[static_cast<size_t>(r)].read()[15], 1);
      AXONN_CUDA_CHECK(cudaGraphExecDestroy(captured.graphs[r]));
      EXPECT_EQ(ncclCommDestroy(pair.comms[r]), ncclSuccess);
    }
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

TEST(NcclRules, TheEndOfACommunicatorWaitsForItsGraphs) {
  Runtime runtime(with_seed(1, 2));
  Captured captured;
  EXPECT_EQ(ncclCommAbort(captured.pair.comms[0]), ncclUnhandledCudaError);
  expect_failure(runtime, Kind::kDeadlock, {"ncclCommAbort", "the graphs that hold kernels of it"});
}

}  // namespace
}  // namespace axonn::gpu_machine::nccl
