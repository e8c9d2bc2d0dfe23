// Fused calls in CUDA graphs: replays next to other calls and next to each other.
#include <gtest/gtest.h>

#include "gpu_machine/runtime/operands.h"

namespace axonn::gpu_machine {
namespace {

using kernels::cuda::SpinFailure;
using testing::CudaError;
using testing::DeviceGuard;
using testing::DeviceMatrix;
using testing::Operands;
using testing::VirtualRanks;

constexpr int kRanks = 2;
constexpr int64_t kM = 8, kK = 8, kN = 8;

// A gather on every rank, captured into a graph, and another one outside of it.
class Gathers {
 public:
  Gathers(const RuntimeOptions& options, double timeout_seconds = 1,
          kernels::cuda::Branches captured = kernels::cuda::Branches::kExpected,
          uint64_t own_rows_ns = kernels::cuda::SpinLimit{}.own_rows_ns)
      : runtime_(options),
        random_(options.machine.seed),
        ranks_(kRanks, 0, timeout_seconds),
        with_(ranks_, kM, kK, kN, random_),
        eager_(with_.outputs(kM)),
        replayed_(with_.outputs(kM)) {
    ranks_.captured_branches = captured;
    if (options.machine.seed % 2 == 0) ranks_.probe_writes();
    for (auto& rank : ranks_.ranks) rank->peers.limit.own_rows_ns = own_rows_ns;
    // A workspace must be used once before it is captured.
    for (int r = 0; r < kRanks; ++r) call(r, eager_, ranks_[r].compute.get());
    testing::synchronize_all(kRanks);
    for (int r = 0; r < kRanks; ++r) capture(r);
  }
  ~Gathers() {
    for (cudaGraphExec_t graph : graphs_) (void)cudaGraphExecDestroy(graph);
  }

  void replay(int r, cudaStream_t stream) {
    AXONN_CUDA_CHECK(cudaGraphLaunch(graphs_[static_cast<size_t>(r)], stream));
  }
  void replay_all() {
    for (int r = 0; r < kRanks; ++r) {
      const DeviceGuard guard(r);
      replay(r, ranks_[r].compute.get());
    }
  }
  void call_outside(int r, cudaStream_t stream) { call(r, eager_, stream); }

  void expect_results() {
    testing::synchronize_all(kRanks);
    for (size_t r = 0; r < kRanks; ++r) {
      EXPECT_EQ(eager_[r].read(), with_.gathered[r]);
      EXPECT_EQ(replayed_[r].read(), with_.gathered[r]);
    }
  }

  Runtime& runtime() { return runtime_; }
  VirtualRanks& ranks() { return ranks_; }
  uint64_t draw() { return random_(); }

 private:
  void call(int r, const std::vector<DeviceMatrix>& outputs, cudaStream_t stream) {
    const auto rank = static_cast<size_t>(r);
    ranks_.gather(r, with_.shards[rank], with_.bs[rank], outputs[rank], kM, kK, kN, stream);
  }

  // Captures two gathers, the second one on another stream.
  void capture(int r) {
    const auto gather = [&](cudaStream_t stream) { call(r, replayed_, stream); };
    graphs_.push_back(ranks_.capture(r, gather, gather));
  }

  Runtime runtime_;
  std::mt19937_64 random_;
  VirtualRanks ranks_;
  Operands with_;
  std::vector<DeviceMatrix> eager_, replayed_;
  std::vector<cudaGraphExec_t> graphs_;
};

RuntimeOptions with_seed(uint64_t seed) {
  RuntimeOptions options;
  options.machine.seed = seed;
  options.devices = kRanks;
  return options;
}

// Replays and other calls follow each other in any order, the same on all ranks, each on one of two
// streams that nothing else orders. They share the workspace, flags and epoch.
TEST(GraphsOfFusedCalls, ReplaysComeBetweenOtherCalls) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    Gathers gathers(with_seed(seed));
    for (int step = 0; step < 5; ++step) {
      const bool is_replay = step == 0 || gathers.draw() % 2 == 0;
      for (int r = 0; r < kRanks; ++r) {
        const DeviceGuard guard(r);
        auto& rank = gathers.ranks()[r];
        cudaStream_t stream = gathers.draw() % 2 == 0 ? rank.compute.get() : rank.other.get();
        is_replay ? gathers.replay(r, stream) : gathers.call_outside(r, stream);
        if (gathers.draw() % 4 == 0) {
          gathers.runtime().give_turns(static_cast<int>(gathers.draw() % 3000));
        }
      }
    }
    gathers.expect_results();
  }
}

// A host that waits for all calls also waits for those in replays.
TEST(GraphsOfFusedCalls, TheHostWaitsForReplays) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(seed);
    Gathers gathers(with_seed(seed));
    for (int r = 0; r < kRanks; ++r) {
      const DeviceGuard guard(r);
      gathers.replay(r, gathers.ranks()[r].compute.get());
    }
    gathers.ranks()[0].order.synchronize();
    EXPECT_EQ(cudaStreamQuery(gathers.ranks()[0].copies.behind(nullptr).copy), cudaSuccess);
    // The graph's last call has counted its epoch: three calls in all.
    EXPECT_EQ(*gathers.ranks()[0].pinned.epoch_to_push(), 3u);
    gathers.expect_results();
  }
}

// The workspace grows between replays: a graph keeps using the memory that it captured, and that
// memory's epochs.
TEST(GraphsOfFusedCalls, AWorkspaceGrowsBetweenReplays) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(seed);
    Gathers gathers(with_seed(seed));
    for (int step = 0; step < 8; ++step) {
      const bool is_replay = step % 3 == 0 || gathers.draw() % 2 == 0;
      if (step == 2 || step == 5) gathers.ranks().grow(gathers.ranks()[0].memory.bytes() + 1);
      for (int r = 0; r < kRanks; ++r) {
        const DeviceGuard guard(r);
        auto& rank = gathers.ranks()[r];
        cudaStream_t stream = gathers.draw() % 2 == 0 ? rank.compute.get() : rank.other.get();
        is_replay ? gathers.replay(r, stream) : gathers.call_outside(r, stream);
      }
    }
    // The workspace has had two memories since then; the first was freed, and its word was reused.
    EXPECT_EQ(gathers.ranks()[0].peers.epoch_to_push, gathers.ranks()[0].pinned.epoch_to_push(1));
    gathers.expect_results();
  }
}

RuntimeOptions in_turn(uint64_t seed, const NodeOrder& order) {
  RuntimeOptions options = with_seed(seed);
  options.branches = Branches::kOneAfterTheOther;
  options.node_order = order;
  return options;
}

// Replays a gather on each rank; its branches run one after the other. Returns whether that went
// well; if not, a rank must have named, in time, the rank it waited for.
bool goes_well(uint64_t seed, const NodeOrder& order) {
  Gathers gathers(in_turn(seed, order), 1e-3);
  try {
    gathers.replay_all();
    gathers.expect_results();
    return true;
  } catch (const CudaError&) {
    EXPECT_TRUE(gathers.runtime().failure());
    if (!gathers.runtime().failure()) return false;
    const MachineError& error = *gathers.runtime().failure();
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(MachineError::Kind::kTrap))
        << error.what();
    const bool is_named = gathers.ranks()[0].pinned.failure().state == SpinFailure::kWritten ||
                          gathers.ranks()[1].pinned.failure().state == SpinFailure::kWritten;
    EXPECT_TRUE(is_named);
    return false;
  }
}

// A gather needs the GEMM and the pushes of its peers to run side by side, which CUDA does not
// promise for a graph's branches. One after the other, the ranks wait for each other until the
// budget ends, unless all pushes come first.
TEST(GraphsOfFusedCalls, BranchesThatRunOneAfterTheOtherEndInTime) {
  constexpr uint64_t kTries = 20, kFew = 5;
  uint64_t of_any_order = 0, with_kernels_first = 0, with_kernels_last = 0;
  for (uint64_t seed = 0; seed < kTries; ++seed) {
    SCOPED_TRACE(seed);
    of_any_order += goes_well(seed, nullptr) ? 1 : 0;
    if (seed >= kFew) continue;
    with_kernels_first += goes_well(seed, &kernels_first) ? 1 : 0;
    with_kernels_last += goes_well(seed, &kernels_last) ? 1 : 0;
  }
  EXPECT_LT(of_any_order, kTries);
  EXPECT_EQ(with_kernels_first, 0u);
  EXPECT_EQ(with_kernels_last, kFew);
}

// If the capture says that branches run in turn, a replay is correct in any order of branches.
TEST(GraphsOfFusedCalls, BranchesThatWereCapturedInTurnMayRunInTurn) {
  for (const NodeOrder& order :
       {NodeOrder(), NodeOrder(&kernels_first), NodeOrder(&kernels_last)}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      SCOPED_TRACE(seed);
      Gathers gathers(in_turn(seed, order), 1, kernels::cuda::Branches::kInTurn);
      for (int replay = 0; replay < 2; ++replay) gathers.replay_all();
      gathers.expect_results();
    }
  }
}

// A GEMM ahead of its own rank's pushes gives up long before the budget ends, and says why.
TEST(GraphsOfFusedCalls, AGemmInFrontOfItsRanksPushesNotices) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(seed);
    Gathers gathers(in_turn(seed, &kernels_first), 1e6, kernels::cuda::Branches::kExpected,
                    /*own_rows_ns=*/100'000);
    EXPECT_THROW(
        {
          gathers.replay_all();
          gathers.expect_results();
        },
        CudaError);
    bool is_told = false;
    for (int r = 0; r < kRanks; ++r) {
      const SpinFailure& failure = gathers.ranks()[r].pinned.failure();
      is_told = is_told || (failure.state == SpinFailure::kWritten && failure.own_rows_stay);
    }
    EXPECT_TRUE(is_told);
  }
}

// Side by side, a GEMM whose own rows have left waits for a late peer until the budget ends.
TEST(GraphsOfFusedCalls, AGemmWhoseRowsHaveLeftWaitsForALatePeer) {
  constexpr uint64_t kOwnRowsNs = 100'000;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE(seed);
    Gathers gathers(with_seed(seed), 1, kernels::cuda::Branches::kExpected, kOwnRowsNs);
    const Machine& machine = gathers.runtime().machine;
    const uint64_t late = machine.now_ns() + 3 * kOwnRowsNs;
    {
      const DeviceGuard guard(0);
      gathers.replay(0, gathers.ranks()[0].compute.get());
    }
    while (machine.now_ns() < late) gathers.runtime().give_turns(1000);
    {
      const DeviceGuard guard(1);
      gathers.replay(1, gathers.ranks()[1].compute.get());
    }
    gathers.expect_results();
  }
}

// The streams' queues write flags only while the host counts calls as the device does.
TEST(WorkspaceMemory, TheHostCountsUntilAGraphDoesOrACallIsCutShort) {
  Runtime runtime(with_seed(0));
  const kernels::cuda::PinnedState pinned;
  const kernels::cuda::CallOrder order;
  kernels::cuda::WorkspaceMemory memory;
  kernels::cuda::Peers peers;
  const auto grow = [&] {
    memory.grow(memory.bytes() + 1, order, pinned, peers, [](int64_t, bool) {});
    EXPECT_FALSE(peers.host_counts) << "outside of calls";
    EXPECT_EQ(peers.host_epoch, 0u);
  };
  const auto call = [&](bool is_captured, uint32_t epoch, bool counts) {
    memory.enter_call(is_captured, peers);
    EXPECT_EQ(peers.host_counts, counts);
    EXPECT_EQ(peers.host_epoch, epoch);
  };
  grow();
  for (uint32_t i = 1; i < 4; ++i) {
    call(false, i, true);
    memory.leave_call(peers);
  }
  call(true, 4, false);  // counts when replayed, not now
  memory.leave_call(peers);
  call(false, 5, false);
  grow();  // while that call, which was cut short, has not ended
  call(false, 1, true);
  call(false, 2, false);  // the previous call was cut short
  memory.leave_call(peers);
  call(false, 3, false);
}

// A memory that a graph has captured keeps its own epochs, even after the workspace has moved to
// another one.
TEST(PinnedState, EachMemoryHasAWordOfItsOwn) {
  Runtime runtime(with_seed(0));
  const kernels::cuda::PinnedState pinned;
  for (int i = 0; i < kernels::cuda::PinnedState::kMostMemories; ++i) {
    EXPECT_EQ(*pinned.epoch_to_push(i), 0u);
    *pinned.epoch_to_push(i) = static_cast<uint32_t>(i + 1);
    for (int before = 0; before < i; ++before) {
      EXPECT_EQ(*pinned.epoch_to_push(before), static_cast<uint32_t>(before + 1));
    }
  }
  EXPECT_EQ(pinned.failure().state, SpinFailure::kNone);
}

// Nothing else uses the lane's stream.
TEST(CopyLane, HasAStreamOfItsOwnThatEndsWithIt) {
  Runtime runtime(with_seed(0));
  {
    const kernels::cuda::CopyLane first, second;
    cudaStream_t mine = first.behind(nullptr).copy;
    EXPECT_NE(mine, second.behind(nullptr).copy);
    int least = 0, greatest = 0, priority = 0;
    AXONN_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    AXONN_CUDA_CHECK(cudaStreamGetPriority(mine, &priority));
    EXPECT_EQ(priority, greatest);
    EXPECT_EQ(runtime.streams.size(), 2u);
  }
  EXPECT_TRUE(runtime.streams.empty());
}

}  // namespace
}  // namespace axonn::gpu_machine
