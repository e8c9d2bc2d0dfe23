// The sm_90 GEMMs, made of CUTLASS's kernels and host code: compiled as they are for a GPU, and
// executed instruction by instruction. Suites whose names begin with Slow run in `make
// emulate-slow`.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gpu_machine/runtime/gemm_calls.h"

namespace axonn::gpu_machine {
namespace {

#ifdef AXONN_HAS_CUTLASS

using kernels::DataType;
using kernels::cuda::Arriving;
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
using testing::VirtualRanks;
using testing::Way;

constexpr Way kWays[] = {Way::kStays,    Way::kGathersA,   Way::kGathersB,
                         Way::kScatters, Way::kSumsByCopy, Way::kSumsByStores};
constexpr Layout kLayouts[] = {kTn, kNn, kNt};
constexpr DataType kDtypes[] = {DataType::kBFloat16, DataType::kFloat16};
constexpr int kNumTiles = static_cast<int>(kernels::kNumSm90Tiles);
constexpr uint32_t kBeforeTheWrap = 0xFFFFFFFD;

// A K with one more block than there are stages.
int64_t deeper_than_stages(int tile) {
  const kernels::Sm90Tile& listed = kernels::kSm90Tiles[static_cast<size_t>(tile)];
  return (listed.num_stages + 1) * kernels::config_of(listed, kernels::kSm90ElementBytes).block_k;
}

// --- Every instance ---------------------------------------------------------------

using Kind = std::tuple<DataType, Layout>;

class EachKind : public ::testing::TestWithParam<Kind> {};

std::string name_of(const ::testing::TestParamInfo<Kind>& info) {
  return std::string(std::get<0>(info.param) == DataType::kFloat16 ? "float16_" : "bfloat16_") +
         std::get<1>(info.param).name;
}

TEST_P(EachKind, ProductsThatStay) {
  const auto [dtype, layout] = GetParam();
  GemmRun run{.ranks = 1, .seed = 1};
  for (int tile = 0; tile < kNumTiles; ++tile) {
    const auto add = [&, type = dtype, as = layout](int64_t m, int64_t n, int64_t k, bool adds) {
      run.calls.push_back({Way::kStays, type, as, m, n, k, adds, tile});
    };
    add(256, 256, deeper_than_stages(tile), false);
    add(200, 136, 72, true);  // ragged in every dim
    add(8, 8, 8, true);
    add(640, 520, 64, true);  // several tiles per CTA
  }
  testing::check_run(run);
}

TEST_P(EachKind, OperandsThatArriveAndRowsThatLeave) {
  const auto [dtype, layout] = GetParam();
  GemmRun run{.seed = 2, .epoch = kBeforeTheWrap};
  for (int tile = 0; tile < kNumTiles; ++tile) {
    const auto add = [&, type = dtype, as = layout](Way way, int64_t m, int64_t n, int64_t k,
                                                    bool adds = false) {
      run.calls.push_back({way, type, as, m, n, k, adds, tile});
    };
    add(Way::kGathersA, 176, 72, 144, true);
    add(Way::kGathersB, 72, 304, 80, true);
    add(Way::kScatters, 304, 136, 72);
    add(Way::kSumsByStores, 272, 72, 64);
    add(Way::kSumsByCopy, 80, 264, 64);
  }
  testing::check_run(run);
}

INSTANTIATE_TEST_SUITE_P(Gemms, EachKind,
                         ::testing::Combine(::testing::ValuesIn(kDtypes),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);

// --- Calls of one way and tile, often ---------------------------------------------

using WayAndTile = std::tuple<Way, int>;

std::string name_of_way(const ::testing::TestParamInfo<WayAndTile>& info) {
  const auto [way, tile] = info.param;
  const std::string name = way == Way::kStays      ? "stays"
                           : way == Way::kGathersA ? "gathers_A"
                           : way == Way::kGathersB ? "gathers_B"
                                                   : "scatters";
  const kernels::Sm90Tile& listed = kernels::kSm90Tiles[static_cast<size_t>(tile)];
  return name + "_" + std::to_string(listed.block_m) + "x" + std::to_string(listed.block_n);
}

class DeepOrShallow : public ::testing::TestWithParam<WayAndTile> {};

// Several tiles per CTA: deeper than the stages and ragged, or so shallow that all loads fit the
// stages and do not wait for the previous tile.
TEST_P(DeepOrShallow, Calls) {
  const auto [way, tile] = GetParam();
  for (uint64_t seed = 0; seed < 10; ++seed) {
    GemmRun run{.seed = seed, .epoch = kBeforeTheWrap};
    const int64_t k = deeper_than_stages(tile);
    run.calls.push_back({way, DataType::kBFloat16, kTn, 512, 248, k, false, tile, 2});
    run.calls.push_back({way, DataType::kBFloat16, kTn, 512, 128, 64, false, tile, 2});
    testing::check_run(run);
  }
}
INSTANTIATE_TEST_SUITE_P(Gemms, DeepOrShallow,
                         ::testing::Combine(::testing::Values(Way::kStays, Way::kGathersA,
                                                              Way::kGathersB, Way::kScatters),
                                            ::testing::Range(0, kNumTiles)),
                         name_of_way);

class KThatArrives : public ::testing::TestWithParam<WayAndTile> {};

// K arrives in one chunk from each rank or in several, which end within blocks of K.
TEST_P(KThatArrives, InChunks) {
  const auto [way, tile] = GetParam();
  const Layout layout = way == Way::kGathersB ? kNn : kNt;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    GemmRun run{.seed = seed, .epoch = kBeforeTheWrap, .is_late = seed % 2 == 1};
    for (const int64_t k : {144, 1120, 144, 1120}) {
      run.calls.push_back({way, DataType::kBFloat16, layout, 136, 264, k, true, tile});
    }
    testing::check_run(run);
  }
}
INSTANTIATE_TEST_SUITE_P(Gemms, KThatArrives,
                         ::testing::Combine(::testing::Values(Way::kGathersB, Way::kGathersA),
                                            ::testing::Range(0, kNumTiles)),
                         name_of_way);

// --- Bits -------------------------------------------------------------------------

// The second half of K cancels the first one, so the result is what rounding left, which depends on
// the order of additions.
TEST(Gemms, BitsDoNotDependOnTheTile) {
  Runtime runtime(testing::options_of(1, 1));
  std::mt19937_64 random(1);
  const auto operand = [&](int64_t rows, int64_t columns, float sign) {
    testing::Matrix values = testing::Matrix::zeros(rows, columns);
    const int64_t half = columns / 2;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < half; ++j) {
        values.at(i, j) =
            std::ldexp(static_cast<float>(random() % 255) - 127, static_cast<int>(random() % 12));
        values.at(i, half + j) = sign * values.at(i, j);
      }
    }
    return DeviceMatrix(values);
  };
  const int64_t m = 72, n = 264, k = 600;
  const DeviceMatrix a = operand(m, k, 1), b = operand(n, k, -1);
  kernels::cuda::FusedGemm gemm{};
  gemm.m = m;
  gemm.n = gemm.ldd = n;
  gemm.k = gemm.lda = gemm.ldb = k;
  gemm.b_transposed = true;
  gemm.dtype = DataType::kBFloat16;
  gemm.a = a.data();
  gemm.b = b.data();
  std::vector<testing::Matrix> results;
  for (const kernels::Sm90Tile& tile : kernels::kSm90Tiles) {
    const DeviceMatrix d(m, n);
    gemm.d = d.data();
    kernels::LaunchConfig config = kernels::config_of(tile, kernels::kSm90ElementBytes);
    config.num_ctas = 2;
    AXONN_CUDA_CHECK(testing::sm90_backend().launch(gemm, config, nullptr));
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    results.push_back(d.read());
  }
  for (const testing::Matrix& result : results) EXPECT_TRUE(result == results[0]);
  const auto is_zero = [](float value) { return value == 0; };
  EXPECT_FALSE(std::all_of(results[0].values.begin(), results[0].values.end(), is_zero));
}

// --- Every instance on many ranks -------------------------------------------------

using KindInWorld = std::tuple<DataType, Layout, int>;

class EachKindInEachWorld : public ::testing::TestWithParam<KindInWorld> {};

std::string name_in_world(const ::testing::TestParamInfo<KindInWorld>& info) {
  const auto [dtype, layout, ranks] = info.param;
  return name_of({{dtype, layout}, info.index}) + "_of_" + std::to_string(ranks) +
         (ranks == 1 ? "_rank" : "_ranks");
}

// Every way, each with random shapes; on 8 ranks only once, because that takes long.
TEST_P(EachKindInEachWorld, EveryWay) {
  const auto [dtype, layout, ranks] = GetParam();
  for (uint64_t seed = 0; seed < (ranks == 8 ? 1 : 3); ++seed) {
    std::mt19937_64 random(seed);
    GemmRun run{.ranks = ranks, .seed = seed, .epoch = kBeforeTheWrap};
    for (int tile = 0; tile < kNumTiles; ++tile) {
      for (const Way way : kWays) {
        run.calls.push_back(testing::draw_call(way, dtype, layout, ranks, 640 / ranks, random));
        run.calls.back().tile = tile;
      }
    }
    std::shuffle(run.calls.begin(), run.calls.end(), random);
    testing::check_run(run);
  }
}

INSTANTIATE_TEST_SUITE_P(SlowGemms, EachKindInEachWorld,
                         ::testing::Combine(::testing::ValuesIn(kDtypes),
                                            ::testing::ValuesIn(kLayouts),
                                            ::testing::Values(1, 2, 4, 8)),
                         name_in_world);

// Sums that reach all ranks with one store to a multicast address, between calls that use the same
// workspaces through their plain addresses.
void check_multicast(int ranks, uint64_t num_seeds) {
  for (uint64_t seed = 0; seed < num_seeds; ++seed) {
    std::mt19937_64 random(seed);
    GemmRun run{.ranks = ranks, .seed = seed, .epoch = kBeforeTheWrap, .is_late = seed % 2 == 1};
    for (int i = 0; i < 5; ++i) {
      const Way way = i % 2 == 0 ? Way::kSumsByMulticast : kWays[1 + random() % 5];
      run.calls.push_back(testing::draw_call(way, kDtypes[random() % 2], kLayouts[random() % 3],
                                             ranks, 160 / ranks, random));
    }
    testing::check_run(run);
  }
}
TEST(SumsByMulticast, OfTwoRanks) { check_multicast(2, 4); }
TEST(SumsByMulticast, OfFourRanks) { check_multicast(4, 1); }
TEST(SlowSumsByMulticast, OfThreeRanks) { check_multicast(3, 10); }
TEST(SlowSumsByMulticast, OfFourRanks) { check_multicast(4, 10); }
TEST(SlowSumsByMulticast, OfEightRanks) { check_multicast(8, 4); }

// --- Calls of all kinds, one after the other on one workspace ---------------------

struct Mix {
  const char* name;
  int ranks;
  int64_t most_rows;  // per share; 512 rows are two chunks
  uint64_t num_seeds;
  bool pulls = false;
};

class MixedCalls : public ::testing::TestWithParam<Mix> {};

// Ranks draw their own tiles and grids. With every other seed, each rank comes long after the one
// before it.
TEST_P(MixedCalls, GiveWhatTheCpuComputes) {
  const Mix mix = GetParam();
  for (uint64_t seed = 0; seed < mix.num_seeds; ++seed) {
    std::mt19937_64 random(seed);
    GemmRun run{.ranks = mix.ranks,
                .seed = seed,
                .epoch = kBeforeTheWrap,
                .pulls = mix.pulls,
                .is_late = seed % 2 == 1};
    for (int i = 0; i < 6; ++i) {
      const Way way = mix.pulls ? kWays[random() % 3] : kWays[random() % std::size(kWays)];
      run.calls.push_back(testing::draw_call(way, kDtypes[random() % 2], kLayouts[random() % 3],
                                             mix.ranks, mix.most_rows, random));
    }
    testing::check_run(run);
  }
}

const auto kNameOfMix = [](const ::testing::TestParamInfo<Mix>& info) {
  return std::string(info.param.name);
};
INSTANTIATE_TEST_SUITE_P(Gemms, MixedCalls,
                         ::testing::Values(Mix{"of_1_rank", 1, 300, 2},
                                           Mix{"of_2_ranks", 2, 530, 2},
                                           Mix{"of_4_ranks", 4, 70, 2}, Mix{"of_8_ranks", 8, 20, 1},
                                           Mix{"by_pulls", 2, 530, 2, true}),
                         kNameOfMix);
INSTANTIATE_TEST_SUITE_P(SlowGemms, MixedCalls,
                         ::testing::Values(Mix{"of_1_rank", 1, 1200, 20},
                                           Mix{"of_2_ranks", 2, 1100, 20},
                                           Mix{"of_4_ranks", 4, 530, 10},
                                           Mix{"of_8_ranks", 8, 270, 4},
                                           Mix{"by_pulls", 4, 530, 10, true}),
                         kNameOfMix);

// --- Ranks that never come, and graphs --------------------------------------------

// The second rank waits in vain, in the GEMM or after it, and names the rank it waits for.
TEST(GemmsThatWait, ARankThatNeverComesIsNamed) {
  const GemmCall calls[] = {{Way::kGathersA, DataType::kBFloat16, kTn, 80, 72, 64},
                            {Way::kGathersB, DataType::kFloat16, kTn, 80, 80, 64},
                            {Way::kGathersA, DataType::kBFloat16, kNt, 80, 72, 144},
                            {Way::kGathersB, DataType::kFloat16, kNn, 80, 72, 144},
                            {Way::kScatters, DataType::kBFloat16, kNn, 80, 72, 64},
                            {Way::kSumsByStores, DataType::kFloat16, kNt, 80, 72, 64}};
  uint64_t seed = 0;
  for (const GemmCall& call : calls) {
    SCOPED_TRACE(call.describe());
    Runtime runtime(testing::options_of(seed, 2));
    std::mt19937_64 random(seed++);
    VirtualRanks ranks(2, 7, 1e-4, testing::sm90_backend(), testing::workspace_bytes({call}));
    GemmProblem problem(ranks, call, random);
    EXPECT_THROW(
        {
          problem.enqueue(1, ranks[1].compute.get());
          testing::synchronize_all(2);
        },
        CudaError);
    testing::expect_wait_in_vain(runtime, ranks, 8, 7);
  }
}

// A graph for every rank: a gather, and a sum on another stream.
class CapturedCalls {
 public:
  CapturedCalls(VirtualRanks& ranks, GemmProblem& gather, GemmProblem& sum) {
    for (int r = 0; r < ranks.size(); ++r) {
      graphs_.push_back(ranks.capture(
          r, [&](cudaStream_t stream) { gather.enqueue(r, stream); },
          [&](cudaStream_t stream) { sum.enqueue(r, stream); }));
    }
  }
  ~CapturedCalls() {
    for (cudaGraphExec_t graph : graphs_) (void)cudaGraphExecDestroy(graph);
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  void replay(int r, cudaStream_t stream) {
    const DeviceGuard guard(r);
    AXONN_CUDA_CHECK(cudaGraphLaunch(graphs_[static_cast<size_t>(r)], stream));
  }

 private:
  std::vector<cudaGraphExec_t> graphs_;
};

class Replays : public ::testing::TestWithParam<uint64_t> {};

// Replays and eager calls in random order, each on one of two streams that nothing else orders.
TEST_P(Replays, ComeBetweenEagerCalls) {
  for (uint64_t seed = 0; seed < GetParam(); ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<GemmCall> calls{
        {Way::kGathersB, DataType::kBFloat16, kNn, 136, 72, 80},
        {Way::kSumsByStores, DataType::kFloat16, kTn, 144, 72, 64},
        {Way::kGathersA, DataType::kFloat16, kTn, 144, 136, 72, true}};
    Runtime runtime(testing::options_of(seed, 2));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(2, kBeforeTheWrap, 1, testing::sm90_backend(),
                       testing::workspace_bytes(calls));
    GemmProblem gather(ranks, calls[0], random), sum(ranks, calls[1], random),
        eager(ranks, calls[2], random);
    for (int r = 0; r < 2; ++r) eager.enqueue(r, ranks[r].compute.get());  // before any capture
    testing::synchronize_all(2);
    CapturedCalls graphs(ranks, gather, sum);
    for (int step = 0; step < 4; ++step) {
      const bool is_replay = step == 0 || random() % 2 == 0;
      for (int r = 0; r < 2; ++r) {
        const auto& stream = random() % 2 == 0 ? ranks[r].compute : ranks[r].other;
        is_replay ? graphs.replay(r, stream.get()) : eager.enqueue(r, stream.get());
        if (random() % 4 == 0) runtime.give_turns(static_cast<int>(random() % 3000));
      }
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess)
        << (runtime.failure() ? runtime.failure()->what() : "");
    testing::synchronize_all(2);
    for (const GemmProblem* problem : {&gather, &sum, &eager}) problem->expect_results();
  }
}

INSTANTIATE_TEST_SUITE_P(Gemms, Replays, ::testing::Values(2));
INSTANTIATE_TEST_SUITE_P(SlowGemms, Replays, ::testing::Values(30));

#else

TEST(Gemms, WereNotBuilt) {
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
}

#endif

}  // namespace
}  // namespace axonn::gpu_machine
