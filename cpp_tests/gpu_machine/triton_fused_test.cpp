// The project's fused Triton kernels on virtual ranks, which run concurrently.
#include "gpu_machine/triton_ranks.h"

namespace axonn::gpu_machine {
namespace {

using kernels::cuda::SpinFailure;
using testing::DataType;
using testing::Matrix;
using testing::TritonArguments;
using testing::TritonCase;

using testing::bytes_of;
using testing::drawn;
using testing::expect_near;
using testing::kBudgetNs;
using testing::kCalls;
using testing::kChunks;
using testing::kRanks;
using testing::Ranks;
using testing::set_operand;

// --- What arrives --------------------------------------------------------------------------------

// Each rank contributes `shard` rows to the gathered operand: rows of a, or the K of b or of a.
class GatherMatmul {
 public:
  GatherMatmul(const TritonCase& what, uint64_t seed)
      : what_(what), ranks_(seed), random_(seed + 3) {
    ranks_.machine().load(testing::fenced_ptx_of(what_));
    const bool aligned = what.is_true("aligned");
    inner_ = what.text("kernel") == "inner_gather_matmul";
    gathers_a_ = !inner_ || what.text("layout")[1] == 'T';
    shard_ = aligned ? 40 : 37;  // makes tiles and chunks straddle shards
    const int64_t whole = kRanks * shard_;
    m_ = inner_ ? (aligned ? 144 : 75) : whole;
    n_ = aligned ? 80 : 53;
    k_ = inner_ ? whole : (aligned ? 80 : 61);
    for (int rank = 0; rank < kRanks; ++rank) {
      workspaces_.push_back(
          ranks_.machine().memory().allocate(bytes_of(what, whole * width()), "workspace"));
    }
  }

  // `absent` is a rank that sends nothing and makes no call; -1 for none.
  void run(int absent = -1, int64_t budget = kBudgetNs) {
    for (int call = 0; call < kCalls; ++call) {
      make_call(call, absent, budget);
      ranks_.machine().run();
    }
  }

  Ranks& ranks() { return ranks_; }

  int count_wrong() {
    int wrong = 0;
    for (size_t call = 0; call < results_.size(); ++call) {
      for (size_t rank = 0; rank < kRanks; ++rank) {
        const auto got = testing::read_values(ranks_.machine(), results_[call][rank],
                                              static_cast<size_t>(m_ * n_), what_.dtype());
        const Matrix& a = gathers_a_ ? gathered_[call] : others_[call][rank];
        const Matrix& b = gathers_a_ ? others_[call][rank] : gathered_[call];
        const bool columns = what_.is_true("columns");
        for (int64_t i = 0; i < m_; ++i) {
          for (int64_t j = 0; j < n_; ++j) {
            expect_near(got[static_cast<size_t>(columns ? j * m_ + i : i * n_ + j)],
                        testing::product_at(a, b, i, j), what_.dtype(), wrong,
                        "call " + std::to_string(call) + ", rank " + std::to_string(rank));
          }
        }
      }
    }
    return wrong;
  }

 private:
  int64_t width() const { return gathers_a_ ? (inner_ ? m_ : k_) : n_; }

  void make_call(int call, int absent, int64_t budget) {
    Machine& machine = ranks_.machine();
    // Stored by rows. An operand that is gathered along K and read as a is its transpose.
    Matrix rows = testing::draw_matrix(kRanks * shard_, width(), what_.dtype(), random_);
    testing::place_matrix(machine, rows, "rows");
    gathered_.push_back(gathers_a_ && inner_ ? transposed(rows) : rows);
    others_.emplace_back();
    results_.emplace_back();
    for (int rank = 0; rank < kRanks; ++rank) {
      others_.back().push_back(gathers_a_ ? drawn(what_, 1, k_, n_, random_)
                                          : drawn(what_, 0, m_, k_, random_));
      testing::place_matrix(machine, others_.back().back(), "other");
      results_.back().push_back(machine.memory().allocate(bytes_of(what_, m_ * n_), "result"));
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == absent) continue;
      ranks_.begin(rank, call);
      send(rank, rows.address);
      multiply(rank, budget);
    }
  }

  static Matrix transposed(const Matrix& rows) {
    Matrix made = rows;
    std::swap(made.rows, made.columns);
    std::swap(made.row_stride, made.column_stride);
    for (int64_t i = 0; i < made.rows; ++i) {
      for (int64_t j = 0; j < made.columns; ++j) {
        made.values[static_cast<size_t>(i * made.columns + j)] = rows.at(j, i);
      }
    }
    return made;
  }

  void send(int rank, uint64_t rows) {
    const comm::ChunkPlan plan{kRanks * shard_, kRanks, kChunks};
    for (int step = 0; step < kRanks; ++step) {
      const int to = (rank - step + kRanks) % kRanks;
      for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
        const comm::Range range = plan.chunk({rank, chunk});
        const uint64_t offset = bytes_of(what_, range.begin * width());
        ranks_.bring(rank, to, chunk, workspaces_[static_cast<size_t>(to)] + offset, rows + offset,
                     bytes_of(what_, range.size() * width()));
      }
    }
  }

  void multiply(int rank, int64_t budget) {
    const auto at = static_cast<size_t>(rank);
    TritonArguments arguments = ranks_.arguments(rank, shard_);
    Matrix gathered = gathered_.back();
    gathered.address = workspaces_[at];
    set_operand(arguments, what_, "a", gathers_a_ ? gathered : others_.back()[at]);
    set_operand(arguments, what_, "b", gathers_a_ ? others_.back()[at] : gathered);
    arguments.set("c_ptr", results_.back()[at]);
    arguments.set("m", m_);
    arguments.set("n", n_);
    arguments.set("k", k_);
    arguments.set("stride_cm", what_.is_true("columns") ? 1 : n_);
    arguments.set("stride_cn", what_.is_true("columns") ? m_ : 1);
    arguments.set("chunk_tile", int64_t{1});
    arguments.set("timeout", budget);
    ranks_.launch(rank, what_, arguments);
  }

  const TritonCase what_;
  Ranks ranks_;
  std::mt19937_64 random_;
  bool inner_, gathers_a_;
  int64_t shard_, m_, n_, k_;
  std::vector<uint64_t> workspaces_;
  std::vector<Matrix> gathered_;                // by call
  std::vector<std::vector<Matrix>> others_;     // by call and rank
  std::vector<std::vector<uint64_t>> results_;  // by call and rank
};

std::vector<TritonCase> gathers(const std::string& folder = testing::kTritonFolder) {
  std::vector<TritonCase> cases = testing::triton_cases_of("all_gather_matmul", folder);
  const auto inner = testing::triton_cases_of("inner_gather_matmul", folder);
  cases.insert(cases.end(), inner.begin(), inner.end());
  return cases;
}

class TritonGather : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonGather);

void gather_and_multiply(const TritonCase& what, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  GatherMatmul calls(what, seed);
  calls.run();
  EXPECT_EQ(calls.count_wrong(), 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(calls.ranks().record(rank).state, SpinFailure::kNone);
  }
}

TEST_P(TritonGather, RanksGatherAndMultiplyCallAfterCall) {
  for (uint64_t seed = 0; seed < 2; ++seed) gather_and_multiply(GetParam(), seed);
}

// One dtype and layout is enough, with pointers and with descriptors.
std::vector<TritonCase> gathers_that_wait_in_vain() {
  std::vector<TritonCase> cases = gathers();
  std::erase_if(cases, [](const TritonCase& what) {
    return what.dtype() != DataType::kBFloat16 || what.text("layout") != "NN" ||
           !what.is_true("aligned");
  });
  return cases;
}

class TritonGatherInVain : public TritonGather {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonGatherInVain);
INSTANTIATE_TEST_SUITE_P(All, TritonGatherInVain, ::testing::ValuesIn(gathers_that_wait_in_vain()),
                         testing::name_of_case);

TEST_P(TritonGatherInVain, ARankThatNeverComesIsNamedBeforeTheTrap) {
  constexpr int kAbsent = 2;
  for (uint64_t seed = 0; seed < 2; ++seed) {
    GatherMatmul calls(GetParam(), seed);
    try {
      calls.run(kAbsent, /*budget=*/100'000);
      ADD_FAILURE() << "no kernel has noticed that a rank is absent";
    } catch (const MachineError& error) {
      EXPECT_EQ(error.kind(), MachineError::Kind::kTrap) << error.what();
    }
    int num_records = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      const SpinFailure record = calls.ranks().record(rank);
      if (record.state != SpinFailure::kWritten) continue;
      ++num_records;
      EXPECT_EQ(record.rank, rank);
      EXPECT_EQ(record.peer, kAbsent);
      EXPECT_EQ(record.expected, Ranks::epoch_of(0));
      EXPECT_EQ(record.seen, testing::kFirstEpoch);
    }
    EXPECT_GT(num_records, 0) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TritonGather, ::testing::ValuesIn(gathers()), testing::name_of_case);

// Every tile size, once.
class EveryTritonGather : public TritonGather {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EveryTritonGather);

TEST_P(EveryTritonGather, RanksGatherAndMultiplyCallAfterCall) {
  gather_and_multiply(GetParam(), 0);
}

INSTANTIATE_TEST_SUITE_P(Slow, EveryTritonGather,
                         ::testing::ValuesIn(gathers(testing::kAllTritonFolder)),
                         testing::name_of_case);

// --- What leaves ---------------------------------------------------------------------------------

// Waits for the flags with acquire, then copies 16-bit words with the threads of one warp.
const std::string kCollect = R"(
.version 8.0
.target sm_90
.address_size 64
.visible .entry collect(.param .u64 flags, .param .u64 from, .param .u64 to, .param .u32 num_flags,
                        .param .u32 epoch, .param .u32 count)
{
  .reg .b16 %h<2>;
  .reg .b32 %r<8>;
  .reg .b64 %d<8>;
  .reg .pred %p<2>;
  ld.param.u64 %d1, [flags];
  ld.param.u64 %d2, [from];
  ld.param.u64 %d3, [to];
  ld.param.u32 %r1, [num_flags];
  ld.param.u32 %r2, [epoch];
  ld.param.u32 %r3, [count];
  mov.u32 %r4, %tid.x;
NEXT:
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra COPY;
LOOK:
  ld.acquire.sys.global.u32 %r5, [%d1];
  setp.ne.u32 %p1, %r5, %r2;
  @%p1 bra LOOK;
  add.u64 %d1, %d1, 128;
  sub.u32 %r1, %r1, 1;
  bra NEXT;
COPY:
  setp.ge.u32 %p1, %r4, %r3;
  @%p1 bra DONE;
  mul.wide.u32 %d4, %r4, 2;
  add.u64 %d5, %d2, %d4;
  ld.global.u16 %h1, [%d5];
  add.u64 %d6, %d3, %d4;
  st.global.u16 [%d6], %h1;
  add.u32 %r4, %r4, 32;
  bra COPY;
DONE:
  ret;
}
)";

class TritonScatter : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonScatter);

// A call of all ranks: their operands, and where each rank collected the slots it received.
struct Scattered {
  std::vector<Matrix> a, b;
  std::vector<uint64_t> collected;
};

struct ScatterSizes {
  int64_t rows, n, k;  // rows of one rank's share
};

Scattered multiply_and_send(Ranks& ranks, const TritonCase& what, const ScatterSizes& sizes,
                            const std::vector<uint64_t>& workspaces, int call,
                            std::mt19937_64& random) {
  const auto [rows, n, k] = sizes;
  Machine& machine = ranks.machine();
  Scattered made;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto own = static_cast<size_t>(rank);
    made.a.push_back(drawn(what, 0, kRanks * rows, k, random));
    made.b.push_back(drawn(what, 1, k, n, random));
    testing::place_matrix(machine, made.a.back(), "a");
    testing::place_matrix(machine, made.b.back(), "b");
    made.collected.push_back(
        machine.memory().allocate(bytes_of(what, kRanks * rows * n), "collected"));
    TritonArguments arguments = ranks.arguments(rank, rows);
    set_operand(arguments, what, "a", made.a.back());
    set_operand(arguments, what, "b", made.b.back());
    for (size_t to = 0; to < 8; ++to) {
      arguments.set("slot" + std::to_string(to),
                    workspaces[to < kRanks ? to : 0] + bytes_of(what, rank * rows * n));
    }
    arguments.set("n", n);
    arguments.set("k", k);
    ranks.begin(rank, call);
    ranks.launch(rank, what, arguments);
    machine.launch(ranks.stream(rank), machine.kernel("collect"), {1, 1, 1}, {32, 1, 1},
                   ranks.pad(rank), workspaces[own], made.collected[own],
                   static_cast<uint32_t>(kRanks * kChunks), Ranks::epoch_of(call),
                   static_cast<uint32_t>(kRanks * rows * n));
  }
  machine.run();
  return made;
}

TEST_P(TritonScatter, RanksMultiplyAndSendCallAfterCall) {
  const TritonCase& what = GetParam();
  const bool aligned = what.is_true("aligned");
  const int64_t tile = what.number("BLOCK_M");
  // Two chunks, one of them short.
  const ScatterSizes sizes{aligned ? tile + 16 : tile + 5, aligned ? 144 : 75, aligned ? 80 : 53};
  Ranks ranks(5);
  Machine& machine = ranks.machine();
  machine.load(testing::fenced_ptx_of(what));
  machine.load(kCollect);
  std::mt19937_64 random(7);
  std::vector<uint64_t> workspaces;
  for (int rank = 0; rank < kRanks; ++rank) {
    workspaces.push_back(
        machine.memory().allocate(bytes_of(what, kRanks * sizes.rows * sizes.n), "workspace"));
  }
  int wrong = 0;
  for (int call = 0; call < kCalls; ++call) {
    const Scattered made = multiply_and_send(ranks, what, sizes, workspaces, call, random);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(ranks.counters(rank), std::vector<uint32_t>(kRanks * kChunks, 0));
      const auto got =
          testing::read_values(machine, made.collected[static_cast<size_t>(rank)],
                               static_cast<size_t>(kRanks * sizes.rows * sizes.n), what.dtype());
      for (int64_t at = 0; at < kRanks * sizes.rows * sizes.n; ++at) {
        const int64_t source = at / sizes.n / sizes.rows, i = at / sizes.n % sizes.rows;
        expect_near(got[static_cast<size_t>(at)],
                    testing::product_at(made.a[static_cast<size_t>(source)],
                                        made.b[static_cast<size_t>(source)], rank * sizes.rows + i,
                                        at % sizes.n),
                    what.dtype(), wrong,
                    "call " + std::to_string(call) + ", from rank " + std::to_string(source) +
                        " to rank " + std::to_string(rank));
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
