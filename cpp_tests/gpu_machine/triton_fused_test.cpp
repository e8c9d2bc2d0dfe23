// The project's fused Triton kernels on virtual ranks, which run against each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gpu_machine/triton_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::DataType;
using testing::Expected;
using testing::Matrix;
using testing::TritonArguments;
using testing::TritonCase;

constexpr int kRanks = 4;            // for which the cases are compiled
constexpr int64_t kFlagStride = 32;  // words: FLAG_STRIDE of axonn_ext/triton/schedule.py
constexpr int64_t kChunks = 2;       // of a shard
constexpr int kCalls = 3;
constexpr uint32_t kFirstEpoch = 0xFFFFFFFDu;  // epochs wrap behind the second call
constexpr uint32_t kPrograms = 2;
constexpr int64_t kBudgetNs = 1'000'000'000;

// The other kernel that a fused op needs, compiled for the same.
TritonCase partner(const TritonCase& of, const std::string& kernel) {
  for (const TritonCase& one : testing::triton_cases_of(kernel)) {
    if (one.text("architecture") == of.text("architecture") && one.dtype() == of.dtype() &&
        (one.is_true("aligned") == of.is_true("aligned"))) {
      return one;
    }
  }
  throw std::invalid_argument("no " + kernel + " for " + of.name);
}

// What the kernels of four ranks share: signals, epochs and streams, as `Signals` of
// axonn_ext/triton/signals.py has them.
class Ranks {
 public:
  explicit Ranks(uint64_t seed) : machine_(options_of(seed)) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string name = " of rank " + std::to_string(rank);
      streams_.push_back(machine_.new_stream(rank));
      flags_.push_back(machine_.put(
          std::vector<uint32_t>(kRanks * kChunks * kFlagStride, kFirstEpoch), "flags" + name));
      counters_.push_back(
          machine_.put(std::vector<uint32_t>(kRanks * kChunks, 0), "counters" + name));
      epochs_.push_back(machine_.put(std::vector<uint32_t>{kFirstEpoch}, "epoch" + name));
      failures_.push_back(machine_.put(std::vector<uint32_t>{0}, "failure" + name));
    }
    flags_ptrs_ = machine_.put(flags_, "addresses of flags");
  }

  Machine& machine() { return machine_; }
  uint32_t failure(int rank) { return machine_.get<uint32_t>(failures_[at(rank)], 1)[0]; }

  // The arguments of every kernel of this rank.
  TritonArguments arguments(int rank, int64_t chunk_tile, int64_t rows, int64_t budget) const {
    TritonArguments made;
    made.set("flags_ptrs", flags_ptrs_);
    made.set("flags_ptr", flags_[at(rank)]);
    made.set("counters_ptr", counters_[at(rank)]);
    made.set("epoch_ptr", epochs_[at(rank)]);
    made.set("failure_ptr", failures_[at(rank)]);
    made.set("budget", budget);
    made.set("rows", rows);
    made.set("rank", int64_t{rank});
    made.set("chunks", kChunks);
    made.set("chunk_tile", chunk_tile);
    return made;
  }

  // Signals.advance().
  void advance(int rank, int call) {
    const uint64_t next =
        machine_.put(std::vector<uint32_t>{kFirstEpoch + 1 + static_cast<uint32_t>(call)}, "epoch");
    machine_.copy(streams_[at(rank)], epochs_[at(rank)], next, 4);
  }
  void launch(int rank, const TritonCase& what, const TritonArguments& arguments) {
    testing::launch_triton(machine_, streams_[at(rank)], what, arguments, kPrograms);
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  static Options options_of(uint64_t seed) {
    Options options;
    options.seed = seed;
    return options;
  }

  Machine machine_;
  std::vector<int> streams_;
  std::vector<uint64_t> flags_, counters_, epochs_, failures_;
  uint64_t flags_ptrs_ = 0;
};

void expect_near(double got, const Expected& expected, DataType dtype, int& wrong,
                 const std::string& where) {
  const double bound = expected.bound +
                       testing::step_of(dtype) * (std::abs(expected.value) + expected.bound) +
                       (dtype == DataType::kFloat16 ? 0x1p-25 : 0);
  if (std::abs(got - expected.value) <= bound) return;
  if (++wrong < 5) {
    ADD_FAILURE() << where << ": " << got << ", expected " << expected.value << " up to " << bound;
  }
}

uint64_t bytes_of(const TritonCase& what, int64_t count) {
  return static_cast<uint64_t>(count * kernels::size_of(what.dtype()));
}

Matrix drawn_b(Machine& machine, const TritonCase& what, int64_t k, int64_t n,
               std::mt19937_64& random) {
  Matrix b = testing::draw_matrix(k, n, what.dtype(), random);
  if (what.text("layout")[1] == 'T') {
    b.row_stride = 1;
    b.column_stride = k;
  }
  testing::place_matrix(machine, b, "b");
  return b;
}

void set_b(TritonArguments& arguments, const TritonCase& what, const Matrix& b) {
  arguments.set_matrix(what, "b", b);
  arguments.set("stride_bk", b.row_stride);
  arguments.set("stride_bn", b.column_stride);
}

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

TEST_P(TritonGather, RanksGatherAndMultiplyCallAfterCall) {
  for (uint64_t seed = 0; seed < 2; ++seed) {
    AllGatherMatmul calls(GetParam(), seed, -1, kBudgetNs);
    EXPECT_EQ(calls.count_wrong(), 0) << "seed " << seed;
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(calls.ranks().failure(rank), 0u);
  }
}

TEST_P(TritonGather, ARankThatNeverComesIsNamed) {
  if (GetParam().facts.contains("a.box") || GetParam().dtype() != DataType::kBFloat16) {
    GTEST_SKIP() << "one dtype without descriptors tells it";
  }
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

}  // namespace
}  // namespace axonn::gpu_machine
