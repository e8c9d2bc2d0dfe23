// await_chunks of the Triton kernels, which a rank without columns runs in place of a product.
#include "gpu_machine/triton_ranks.h"

namespace axonn::gpu_machine::testing {
namespace {

// Each rank pushes its shard, waits, and copies what it has gathered to a place of its own.
class AwaitedGather {
 public:
  AwaitedGather(const TritonCase& what, uint64_t seed, int absent, int64_t budget)
      : ranks_(seed), random_(seed + 1) {
    const TritonCase push = partner(what, "push_shard");
    Machine& machine = ranks_.machine();
    machine.load(fenced_ptx_of(what));
    machine.load(fenced_ptx_of(push));
    const int64_t rows = 48, k = 80, count = kRanks * rows * k;
    std::vector<uint64_t> gathered;
    for (int rank = 0; rank < kRanks; ++rank) {
      gathered.push_back(machine.memory().allocate(bytes_of(what, 2 * count), "gathered rows"));
    }
    const uint64_t gathered_ptrs = machine.put(gathered, "addresses of gathered rows");
    for (int call = 0; call < kCalls; ++call) {
      expected_.push_back(draw(static_cast<size_t>(count), what.dtype(), random_, 1.0));
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == absent) continue;
        const uint64_t own = bytes_of(what, rows * k), at = own * static_cast<uint64_t>(rank);
        const auto begin = expected_.back().begin() + static_cast<int64_t>(at);
        TritonArguments arguments = ranks_.arguments(rank, 16, rows, budget);
        arguments.set(
            "shard_ptr",
            machine.put(std::vector<std::byte>(begin, begin + static_cast<int64_t>(own)), "shard"));
        arguments.set("gathered_ptrs", gathered_ptrs);
        arguments.set("k", k);
        arguments.set("half_stride", count);
        arguments.set("count", kRanks * kChunks);
        ranks_.advance(rank, call);
        ranks_.launch(rank, push, arguments);
        ranks_.launch(rank, what, arguments, 1);
        const uint64_t bytes = bytes_of(what, count);
        const uint32_t epoch = kFirstEpoch + 1 + static_cast<uint32_t>(call);
        results_.push_back(machine.memory().allocate(bytes, "result"));
        ranks_.copy(rank, results_.back(),
                    gathered[static_cast<size_t>(rank)] + (epoch & 1u) * bytes, bytes);
      }
    }
    machine.run();
  }

  Ranks& ranks() { return ranks_; }
  bool is_right(size_t call, size_t rank) {
    return ranks_.machine().get<std::byte>(results_[call * kRanks + rank],
                                           expected_[call].size()) == expected_[call];
  }

 private:
  Ranks ranks_;
  std::mt19937_64 random_;
  std::vector<std::vector<std::byte>> expected_;  // by call
  std::vector<uint64_t> results_;                 // by call and rank
};

class TritonAwait : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonAwait);

TEST_P(TritonAwait, ChunksHaveArrivedCallAfterCall) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    AwaitedGather calls(GetParam(), seed, -1, kBudgetNs);
    for (size_t call = 0; call < kCalls; ++call) {
      for (size_t rank = 0; rank < kRanks; ++rank) {
        EXPECT_TRUE(calls.is_right(call, rank)) << "call " << call << ", rank " << rank;
        EXPECT_EQ(calls.ranks().failure(static_cast<int>(rank)), 0u);
      }
    }
  }
}

TEST_P(TritonAwait, ARankThatNeverComesIsNoticed) {
  // The kernel goes on when its budget is spent, and the copy behind it finds what is missing.
  EXPECT_THROW(AwaitedGather(GetParam(), 0, 1, 100'000), MachineError);
}

INSTANTIATE_TEST_SUITE_P(All, TritonAwait, ::testing::ValuesIn(triton_cases_of("await_chunks")),
                         name_of_case);

}  // namespace
}  // namespace axonn::gpu_machine::testing
