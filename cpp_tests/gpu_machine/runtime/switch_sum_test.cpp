// All-reduces that the switch adds up: multimem.ld_reduce next to the sm_90 GEMMs, between calls
// that use the same workspaces in other ways. Suites whose names begin with Slow run in `make
// emulate-slow`.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <random>
#include <vector>

#include "gpu_machine/runtime/gemm_calls.h"

namespace axonn::gpu_machine {
namespace {

#ifdef AXONN_HAS_CUTLASS

using kernels::DataType;
using kernels::cuda::SumBroadcast;
using testing::CudaError;
using testing::DeviceGuard;
using testing::DeviceMatrix;
using testing::GemmCall;
using testing::GemmProblem;
using testing::GemmRun;
using testing::kNn;
using testing::kNt;
using testing::kTn;
using testing::Layout;
using testing::Matrix;
using testing::VirtualRanks;
using testing::Way;

constexpr Way kWays[] = {Way::kGathersA,   Way::kGathersB,     Way::kScatters,
                         Way::kSumsByCopy, Way::kSumsByStores, Way::kSumsByMulticast};
constexpr Layout kLayouts[] = {kTn, kNn, kNt};
constexpr DataType kDtypes[] = {DataType::kBFloat16, DataType::kFloat16};
constexpr uint32_t kBeforeTheWrap = 0xFFFFFFFD;

// A call with a grid of `ctas` CTAs, an eighth of which add up.
GemmCall in_switch(DataType dtype, Layout layout, int64_t m, int64_t n, int64_t k, int ctas = 4) {
  GemmCall call{Way::kSumsInSwitch, dtype, layout, m, n, k};
  call.ctas = ctas;
  return call;
}

// Calls whose rows are one part or several, some of them ragged, with other calls in between.
void check_mix(int ranks, uint64_t num_seeds) {
  for (uint64_t seed = 0; seed < num_seeds; ++seed) {
    std::mt19937_64 random(seed);
    GemmRun run{.ranks = ranks, .seed = seed, .epoch = kBeforeTheWrap, .is_late = seed % 2 == 1};
    const auto draw = [&](Way way) {
      return testing::draw_call(way, kDtypes[random() % 2], kLayouts[random() % 3], ranks,
                                160 / ranks, random);
    };
    run.calls.push_back(in_switch(DataType::kBFloat16, kTn, 1040, 72, 64));
    run.calls.push_back(draw(kWays[random() % std::size(kWays)]));
    run.calls.push_back(draw(Way::kSumsInSwitch));
    run.calls.push_back(in_switch(DataType::kFloat16, kNt, 512, 136, 24));
    run.calls.push_back(draw(kWays[random() % std::size(kWays)]));
    testing::check_run(run);
  }
}
TEST(SumsInSwitch, OfTwoRanks) { check_mix(2, 4); }
TEST(SumsInSwitch, OfFourRanks) { check_mix(4, 1); }
TEST(SumsInSwitch, OfEightRanks) { check_mix(8, 1); }
TEST(SlowSumsInSwitch, OfTwoRanks) { check_mix(2, 20); }
TEST(SlowSumsInSwitch, OfThreeRanks) { check_mix(3, 10); }
TEST(SlowSumsInSwitch, OfFourRanks) { check_mix(4, 10); }
TEST(SlowSumsInSwitch, OfEightRanks) { check_mix(8, 4); }

// In direct succession: each overwrites what the previous one has added up.
TEST(SumsInSwitch, FollowEachOther) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    GemmRun run{.seed = seed, .epoch = kBeforeTheWrap};
    for (const int64_t m : {512, 16, 512}) {
      run.calls.push_back(in_switch(DataType::kBFloat16, kTn, m, 64, 64, 16));
    }
    testing::check_run(run);
  }
}

// The number of parts of 2,048 rows, and the largest number there can be.
void check_many_parts(int64_t rows, uint64_t num_seeds) {
  for (uint64_t seed = 0; seed < num_seeds; ++seed) {
    GemmRun run{.seed = seed, .epoch = kBeforeTheWrap, .is_late = seed % 2 == 1};
    run.calls.assign(2, in_switch(DataType::kBFloat16, kTn, rows, 8, 8));
    testing::check_run(run);
  }
}
TEST(SumsInSwitch, OfEightParts) { check_many_parts(2048, 1); }
TEST(SlowSumsInSwitch, OfEightParts) { check_many_parts(2048, 10); }
TEST(SlowSumsInSwitch, OfAllParts) { check_many_parts(8192, 4); }

// A rank waits in vain for the addends of the other, and says so. It also waits in vain for its own
// sums, which lack them, but does not name itself.
TEST(SumsInSwitch, ARankThatNeverComesIsNamed) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const int present = seed % 2 == 0 ? 1 : 0;
    const GemmCall call{Way::kSumsInSwitch, DataType::kBFloat16, kNn, 80, 72, 64};
    Runtime runtime(testing::options_of(seed, 2));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(2, 7, 1e-4, testing::sm90_backend(), testing::workspace_bytes({call}));
    ranks.add_multicast();
    GemmProblem problem(ranks, call, random);
    EXPECT_THROW(
        {
          problem.enqueue(present, ranks[present].compute.get());
          testing::synchronize_all(2);
        },
        CudaError);
    const kernels::cuda::SpinFailure& failure = ranks[present].pinned.failure();
    EXPECT_EQ(failure.state, kernels::cuda::SpinFailure::kWritten);
    EXPECT_EQ(failure.rank, present);
    EXPECT_EQ(failure.peer, 1 - present);
    EXPECT_EQ(failure.chunk, 0);
    EXPECT_EQ(failure.expected, 8u);
    EXPECT_EQ(failure.seen, 7u);
  }
}

// A graph for each rank: a sum in the switch, and a gather on another stream. Replays and eager
// calls alternate.
void check_replays(uint64_t num_seeds) {
  for (uint64_t seed = 0; seed < num_seeds; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<GemmCall> calls{{Way::kSumsInSwitch, DataType::kBFloat16, kTn, 512, 72, 64},
                                      {Way::kGathersA, DataType::kFloat16, kTn, 144, 136, 72, true},
                                      {Way::kSumsInSwitch, DataType::kFloat16, kNn, 48, 136, 72}};
    Runtime runtime(testing::options_of(seed, 2));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(2, kBeforeTheWrap, 1, testing::sm90_backend(),
                       testing::workspace_bytes(calls));
    ranks.add_multicast();
    GemmProblem sum(ranks, calls[0], random), gather(ranks, calls[1], random),
        eager(ranks, calls[2], random);
    for (int r = 0; r < 2; ++r) eager.enqueue(r, ranks[r].compute.get());  // before any capture
    testing::synchronize_all(2);
    std::vector<cudaGraphExec_t> graphs;
    for (int r = 0; r < 2; ++r) {
      graphs.push_back(ranks.capture(
          r, [&](cudaStream_t stream) { sum.enqueue(r, stream); },
          [&](cudaStream_t stream) { gather.enqueue(r, stream); }));
    }
    for (int step = 0; step < 4; ++step) {
      for (int r = 0; r < 2; ++r) {
        const DeviceGuard guard(r);
        const auto& stream = random() % 2 == 0 ? ranks[r].compute : ranks[r].other;
        if (step % 2 == 0) {
          AXONN_CUDA_CHECK(cudaGraphLaunch(graphs[static_cast<size_t>(r)], stream.get()));
        } else {
          eager.enqueue(r, stream.get());
        }
      }
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess)
        << (runtime.failure() ? runtime.failure()->what() : "");
    testing::synchronize_all(2);
    for (const GemmProblem* problem : {&sum, &gather, &eager}) problem->expect_results();
    for (cudaGraphExec_t graph : graphs) (void)cudaGraphExecDestroy(graph);
  }
}
TEST(SumsInSwitch, AreReplayed) { check_replays(2); }
TEST(SlowSumsInSwitch, AreReplayed) { check_replays(20); }

// --- Rounding ---------------------------------------------------------------------

// Returns the identity matrix.
Matrix identity(int64_t size) {
  Matrix result = Matrix::zeros(size, size);
  for (int64_t i = 0; i < size; ++i) result.at(i, i) = 1;
  return result;
}

// Adds random numbers over ranks: A @ I on each. The addends are exact, since a GEMM that
// multiplies by 1 rounds nothing. So the error against sums in double is that of the sums in fp32,
// with one rounding of 2^-24 for each addition of numbers no larger than the sum of all
// magnitudes, plus one rounding to the dtype. Without .acc::f32, each addition would be rounded to
// the dtype.
TEST(SumsInSwitch, AreRoundedOnce) {
  constexpr int kRanks = 8;
  constexpr int64_t kRows = 64, kColumns = 32;
  for (const DataType dtype : kDtypes) {
    Runtime runtime(testing::options_of(3, kRanks));
    VirtualRanks ranks(kRanks, 0, 1, testing::sm90_backend(), 4 * kRows * kColumns);
    ranks.add_multicast();
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<Matrix> addends;
    std::vector<DeviceMatrix> results;
    for (int r = 0; r < kRanks; ++r) {
      const DeviceGuard guard(r);
      Matrix a = Matrix::zeros(kRows, kColumns);
      for (float& value : a.values) value = normal(random);
      addends.push_back(a.rounded(dtype));
      const DeviceMatrix left(addends.back(), dtype), right(identity(kColumns), dtype);
      results.emplace_back(kRows, kColumns, dtype);
      kernels::cuda::FusedGemm gemm{};
      gemm.a = left.data();
      gemm.b = right.data();
      gemm.m = kRows;
      gemm.n = gemm.k = gemm.lda = gemm.ldb = gemm.ldd = kColumns;
      gemm.dtype = dtype;
      auto config = kernels::config_of(kernels::kSm90Tiles[0], kernels::kSm90ElementBytes);
      config.num_ctas = 4;
      auto& rank = ranks[r];
      kernels::cuda::gemm_all_reduce(rank.peers, ranks.backend, config, gemm, SumBroadcast::kSwitch,
                                     results.back().data(), rank.copies.behind(rank.compute.get()));
    }
    testing::synchronize_all(kRanks);
    std::vector<Matrix> got;
    for (const DeviceMatrix& result : results) got.push_back(result.read());
    for (const Matrix& each : got) EXPECT_TRUE(each == got[0]) << "ranks have other bits";
    const double narrow = dtype == DataType::kFloat16 ? 0x1p-11 : 0x1p-8;
    for (size_t i = 0; i < addends[0].values.size(); ++i) {
      double sum = 0, magnitude = 0;
      for (const Matrix& each : addends) {
        sum += static_cast<double>(each.values[i]);
        magnitude += std::abs(static_cast<double>(each.values[i]));
      }
      const double wide = (kRanks - 1) * 0x1p-24 * magnitude;
      EXPECT_NEAR(static_cast<double>(got[0].values[i]), sum, narrow * std::abs(sum) + 2 * wide);
    }
  }
}

#else

TEST(SumsInSwitch, WereNotBuilt) {
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
}

#endif

}  // namespace
}  // namespace axonn::gpu_machine
