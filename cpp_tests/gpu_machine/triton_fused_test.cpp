// The project's fused Triton kernels on virtual ranks, which run against each other.
#include "gpu_machine/triton_ranks.h"

namespace axonn::gpu_machine {
namespace {

using testing::DataType;
using testing::Expected;
using testing::Matrix;
using testing::TritonArguments;
using testing::TritonCase;

using testing::bytes_of;
using testing::drawn_b;
using testing::expect_near;
using testing::kBudgetNs;
using testing::kCalls;
using testing::kChunks;
using testing::kRanks;
using testing::partner;
using testing::Ranks;
using testing::set_b;

// --- all_gather_matmul ---------------------------------------------------------------------------

struct Gather {
  int64_t rows = 40;  // of a shard; tiles and chunks straddle shards
  int64_t n, k;
  int64_t chunk_tile = 16;
};

class AllGatherMatmul {
 public:
  // `absent`: a rank that makes no call; -1 for none.
  AllGatherMatmul(const TritonCase& what, uint64_t seed, int absent, int64_t budget)
      : what_(what),
        push_(partner(what, "push_shard")),
        sizes_(what.is_true("aligned") ? Gather{40, 144, 80, 16} : Gather{37, 75, 53, 16}),
        ranks_(seed),
        random_(seed + 3) {
    ranks_.machine().load(testing::fenced_ptx_of(what_));
    ranks_.machine().load(testing::fenced_ptx_of(push_));
    const int64_t m = kRanks * sizes_.rows;
    for (int rank = 0; rank < kRanks; ++rank) {
      gathered_.push_back(
          ranks_.machine().memory().allocate(bytes_of(what, 2 * m * sizes_.k), "gathered rows"));
      b_.push_back(drawn_b(ranks_.machine(), what, sizes_.k, sizes_.n, random_));
    }
    gathered_ptrs_ = ranks_.machine().put(gathered_, "addresses of gathered rows");
    for (int call = 0; call < kCalls; ++call) {
      a_.push_back(testing::draw_matrix(m, sizes_.k, what.dtype(), random_));
      results_.emplace_back();
      for (int rank = 0; rank < kRanks; ++rank) {
        results_.back().push_back(0);
        if (rank != absent) enqueue(rank, call, budget);
      }
    }
    ranks_.machine().run();
  }

  Ranks& ranks() { return ranks_; }

  int count_wrong() {
    int wrong = 0;
    const int64_t m = kRanks * sizes_.rows, n = sizes_.n;
    for (size_t call = 0; call < results_.size(); ++call) {
      for (size_t rank = 0; rank < kRanks; ++rank) {
        const auto got = testing::read_values(ranks_.machine(), results_[call][rank],
                                              static_cast<size_t>(m * n), what_.dtype());
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            expect_near(got[static_cast<size_t>(i * n + j)],
                        testing::product_at(a_[call], b_[rank], i, j, what_.rounds_to_tf32()),
                        what_.dtype(), wrong,
                        "call " + std::to_string(call) + ", rank " + std::to_string(rank));
          }
        }
      }
    }
    return wrong;
  }

 private:
  void enqueue(int rank, int call, int64_t budget) {
    const auto at = static_cast<size_t>(rank);
    const int64_t m = kRanks * sizes_.rows;
    Matrix shard{sizes_.rows, sizes_.k, sizes_.k, 1, what_.dtype(), {}, 0};
    const auto begin = a_.back().values.begin() + rank * sizes_.rows * sizes_.k;
    shard.values.assign(begin, begin + sizes_.rows * sizes_.k);
    testing::place_matrix(ranks_.machine(), shard, "shard");
    results_.back()[at] =
        ranks_.machine().memory().allocate(bytes_of(what_, m * sizes_.n), "result");
    TritonArguments arguments = ranks_.arguments(rank, sizes_.chunk_tile, sizes_.rows, budget);
    arguments.set("shard_ptr", shard.address);
    arguments.set("gathered_ptrs", gathered_ptrs_);
    arguments.set("k", sizes_.k);
    arguments.set("n", sizes_.n);
    arguments.set("half_stride", m * sizes_.k);
    arguments.set("c_ptr", results_.back()[at]);
    if (what_.facts.contains("a.box")) {
      arguments.set_descriptor(what_, "a", gathered_[at], {2, m, sizes_.k},
                               {m * sizes_.k, sizes_.k, 1});
    } else {
      arguments.set("a", gathered_[at]);
    }
    set_b(arguments, what_, b_[at]);
    ranks_.advance(rank, call);
    ranks_.launch(rank, push_, arguments);
    ranks_.launch(rank, what_, arguments);
  }

  const TritonCase what_, push_;
  const Gather sizes_;
  Ranks ranks_;
  std::mt19937_64 random_;
  std::vector<uint64_t> gathered_;
  uint64_t gathered_ptrs_ = 0;
  std::vector<Matrix> a_, b_;                   // by call, by rank
  std::vector<std::vector<uint64_t>> results_;  // by call and rank
};

class TritonGather : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonGather);

void gather_and_multiply(const TritonCase& what, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  AllGatherMatmul calls(what, seed, -1, kBudgetNs);
  EXPECT_EQ(calls.count_wrong(), 0);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(calls.ranks().failure(rank), 0u);
}

TEST_P(TritonGather, RanksGatherAndMultiplyCallAfterCall) {
  for (uint64_t seed = 0; seed < 2; ++seed) gather_and_multiply(GetParam(), seed);
}

// One dtype without descriptors tells it.
std::vector<TritonCase> gathers_by_pointers() {
  std::vector<TritonCase> cases = testing::triton_cases_of("all_gather_matmul");
  std::erase_if(cases, [](const TritonCase& what) {
    return what.facts.contains("a.box") || what.dtype() != DataType::kBFloat16;
  });
  return cases;
}

class TritonGatherByPointers : public TritonGather {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonGatherByPointers);
INSTANTIATE_TEST_SUITE_P(All, TritonGatherByPointers, ::testing::ValuesIn(gathers_by_pointers()),
                         testing::name_of_case);

TEST_P(TritonGatherByPointers, ARankThatNeverComesIsNamed) {
  constexpr int kAbsent = 2;
  // Kernels go on with rows that nobody has written, which is the only error that they may make.
  try {
    AllGatherMatmul calls(GetParam(), 1, kAbsent, 100'000);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == kAbsent) continue;
      const uint32_t failure = calls.ranks().failure(rank);
      ASSERT_NE(failure, 0u) << "rank " << rank;
      EXPECT_EQ((failure - 1) / kChunks, static_cast<uint32_t>(kAbsent));
    }
  } catch (const MachineError& error) {
    EXPECT_NE(std::string(error.what()).find("reads what nobody has written, at gathered rows"),
              std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, TritonGather,
                         ::testing::ValuesIn(testing::triton_cases_of("all_gather_matmul")),
                         testing::name_of_case);

// Every tile size, once.
class EveryTritonGather : public TritonGather {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EveryTritonGather);

TEST_P(EveryTritonGather, RanksGatherAndMultiplyCallAfterCall) {
  gather_and_multiply(GetParam(), 0);
}

INSTANTIATE_TEST_SUITE_P(Slow, EveryTritonGather,
                         ::testing::ValuesIn(testing::triton_cases_of("all_gather_matmul",
                                                                      testing::kAllTritonFolder)),
                         testing::name_of_case);

// --- matmul_reduce_scatter -----------------------------------------------------------------------

class TritonScatter : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonScatter);

TEST_P(TritonScatter, RanksMultiplyAndAddCallAfterCall) {
  const TritonCase& what = GetParam();
  const TritonCase reduce = partner(what, "reduce_slots");
  const DataType dtype = what.dtype();
  const int64_t tile = what.number("BLOCK_M");
  const int64_t rows =
      what.is_true("aligned") ? tile + 16 : tile + 5;  // two chunks, one of them short
  const int64_t n = what.is_true("aligned") ? 144 : 75, k = what.is_true("aligned") ? 80 : 53;
  const int64_t m = kRanks * rows;
  Ranks ranks(5);
  Machine& machine = ranks.machine();
  machine.load(testing::fenced_ptx_of(what));
  machine.load(testing::fenced_ptx_of(reduce));
  std::mt19937_64 random(7);
  std::vector<uint64_t> slots;
  for (int rank = 0; rank < kRanks; ++rank) {
    slots.push_back(machine.memory().allocate(bytes_of(what, 2 * m * n), "slots"));
  }
  const uint64_t slots_ptrs = machine.put(slots, "addresses of slots");
  std::vector<std::vector<Matrix>> a(kCalls), b(kCalls);
  std::vector<std::vector<uint64_t>> results(kCalls);
  for (int call = 0; call < kCalls; ++call) {
    const auto now = static_cast<size_t>(call);
    for (int rank = 0; rank < kRanks; ++rank) {
      a[now].push_back(testing::draw_matrix(m, k, dtype, random));
      testing::place_matrix(machine, a[now].back(), "a");
      b[now].push_back(drawn_b(machine, what, k, n, random));
      results[now].push_back(machine.memory().allocate(bytes_of(what, rows * n), "result"));
      TritonArguments arguments = ranks.arguments(rank, tile, rows, kBudgetNs);
      arguments.set_matrix(what, "a", a[now].back());
      arguments.set("stride_am", k);
      arguments.set("stride_ak", int64_t{1});
      set_b(arguments, what, b[now].back());
      arguments.set("slots_ptr", slots[static_cast<size_t>(rank)]);
      arguments.set("slots_ptrs", slots_ptrs);
      arguments.set("n", n);
      arguments.set("k", k);
      arguments.set("half_stride", m * n);
      arguments.set("out_ptr", results[now].back());
      ranks.advance(rank, call);
      ranks.launch(rank, what, arguments);
      ranks.launch(rank, reduce, arguments);
    }
  }
  machine.run();
  int wrong = 0;
  for (size_t call = 0; call < kCalls; ++call) {
    for (size_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(ranks.failure(static_cast<int>(rank)), 0u);
      const auto got =
          testing::read_values(machine, results[call][rank], static_cast<size_t>(rows * n), dtype);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          Expected sum;
          for (size_t source = 0; source < kRanks; ++source) {
            const Expected addend = testing::product_at(a[call][source], b[call][source],
                                                        static_cast<int64_t>(rank) * rows + i, j,
                                                        what.rounds_to_tf32());
            sum.value += addend.value;
            // A slot rounds its addend to the dtype, and adding rounds to float32.
            sum.bound += addend.bound + (testing::step_of(dtype) + kRanks * 0x1p-24) *
                                            (std::abs(addend.value) + addend.bound);
          }
          expect_near(got[static_cast<size_t>(i * n + j)], sum, dtype, wrong,
                      "call " + std::to_string(call) + ", rank " + std::to_string(rank));
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(All, TritonScatter,
                         ::testing::ValuesIn(testing::triton_cases_of("multiply_and_send")),
                         testing::name_of_case);
INSTANTIATE_TEST_SUITE_P(Slow, TritonScatter,
                         ::testing::ValuesIn(testing::triton_cases_of("multiply_and_send",
                                                                      testing::kAllTritonFolder)),
                         testing::name_of_case);

}  // namespace
}  // namespace axonn::gpu_machine
