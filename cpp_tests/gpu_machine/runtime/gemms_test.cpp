// The GEMMs for sm_90, of CUTLASS's kernels and host code: compiled as they are built for a GPU,
// and executed instruction by instruction. Values are small integers, so that every sum is exact in
// fp32 and in bfloat16, in any order.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "core/cuda/sm90/instances.h"
#include "core/cuda/sm90/plans.h"
#include "core/numeric/data_type.h"
#include "gpu_machine/runtime/virtual_ranks.h"

namespace axonn::gpu_machine {
namespace {

#ifdef AXONN_HAS_CUTLASS

using kernels::cuda::FusedGemm;
using kernels::sm90::Instance;
using testing::DeviceMatrix;
using testing::Matrix;

struct Shape {
  int64_t m, n, k;
};

Matrix transposed(const Matrix& of) {
  Matrix result{of.columns, of.rows, std::vector<float>(of.values.size())};
  for (int64_t i = 0; i < of.rows; ++i) {
    for (int64_t j = 0; j < of.columns; ++j) {
      result.values[static_cast<size_t>(j * of.rows + i)] = of.at(i, j);
    }
  }
  return result;
}

// As it is stored. Addends are stored in bfloat16, too, and added in fp32, which is exact.
Matrix stored(Matrix m) {
  for (float& value : m.values) value = kernels::BFloat16::from_float(value).to_float();
  return m;
}

// a @ b.T, plus a bias and a residual where they are asked for.
void check_product(const Instance& instance, Shape shape, bool adds, int ctas, uint64_t seed) {
  SCOPED_TRACE("tile of " + std::to_string(instance.config.block_n) + " columns, " +
               std::to_string(shape.m) + " x " + std::to_string(shape.n) + " x " +
               std::to_string(shape.k) + ", seed " + std::to_string(seed));
  RuntimeOptions options;
  options.machine.seed = seed;
  options.devices = 1;
  Runtime runtime(options);
  std::mt19937_64 random(seed);
  const Matrix a = Matrix::random(shape.m, shape.k, random);
  const Matrix b = Matrix::random(shape.k, shape.n, random);
  const Matrix bias = Matrix::random(1, shape.n, random);
  const Matrix residual = Matrix::random(shape.m, shape.n, random);
  const DeviceMatrix on_device_a(a), on_device_b(transposed(b)), on_device_bias(bias),
      on_device_residual(residual), d(shape.m, shape.n);
  FusedGemm gemm{};
  gemm.a = on_device_a.data();
  gemm.b = on_device_b.data();
  gemm.d = d.data();
  gemm.m = shape.m;
  gemm.n = shape.n;
  gemm.k = gemm.lda = gemm.ldb = shape.k;
  gemm.ldd = shape.n;
  gemm.b_transposed = true;
  gemm.dtype = kernels::DataType::kBFloat16;
  if (adds) {
    gemm.bias = on_device_bias.data();
    gemm.residual = on_device_residual.data();
  }
  kernels::LaunchConfig config = instance.config;
  config.num_ctas = ctas;
  const cudaError_t launched = instance.launch(gemm, config, nullptr);
  if (runtime.failure()) FAIL() << runtime.failure()->what();
  ASSERT_EQ(launched, cudaSuccess);
  const cudaError_t status = cudaDeviceSynchronize();
  if (runtime.failure()) FAIL() << runtime.failure()->what();
  ASSERT_EQ(status, cudaSuccess);
  Matrix expected = a * b;
  for (int64_t i = 0; adds && i < shape.m; ++i) {
    for (int64_t j = 0; j < shape.n; ++j) {
      expected.values[static_cast<size_t>(i * shape.n + j)] += bias.at(0, j) + residual.at(i, j);
    }
  }
  EXPECT_EQ(d.read(), expected);
}

TEST(Gemms, ProductsThatStay) {
  for (const Instance& instance : kernels::sm90::gemm_bf16_tn()) {
    if (instance.departs) continue;
    check_product(instance, {256, 256, 64}, false, 4, 1);
    check_product(instance, {256, 256, 448}, true, 4, 2);  // more depth than there are stages
    check_product(instance, {200, 136, 72}, true, 2, 3);   // ragged everywhere
    check_product(instance, {8, 8, 8}, false, 2, 4);
    check_product(instance, {640, 520, 128}, true, 4, 5);  // several tiles for each CTA
  }
}

// --- Rows that arrive, and rows that leave ----------------------------------------

constexpr int kRanks = 2;
constexpr Shape kFused{512, 64, 64};  // a chunk has 256 rows
// More depth than there are stages, ragged, and several tiles for a CTA.
constexpr Shape kDeep{512, 248, 448};
// Several tiles for a CTA, whose loads all fit the stages: they do not wait for the tile before.
constexpr Shape kShallow{512, 128, 64};

const Instance* find_instance(const FusedGemm& gemm, int64_t block_n) {
  static const std::vector<Instance> instances = kernels::sm90::gemm_bf16_tn();
  for (const Instance& instance : instances) {
    if (instance.departs == (gemm.departures.num_ranks > 0) && instance.config.block_n == block_n) {
      return &instance;
    }
  }
  return nullptr;
}

// What csrc/ops gives the calls, of the tn instances alone.
kernels::cuda::GemmBackend tn_backend() {
  return {&kernels::sm90::why_unsupported,
          [](const FusedGemm& gemm, const kernels::LaunchConfig& config, cudaStream_t stream) {
            const Instance* instance = find_instance(gemm, config.block_n);
            return instance == nullptr ? cudaErrorInvalidValue
                                       : instance->launch(gemm, config, stream);
          },
          [](const kernels::cuda::SumToAll&, cudaStream_t) { return cudaErrorNotSupported; },
          [] { return cudaSuccess; }};
}

FusedGemm fused_gemm(const DeviceMatrix& b, Shape shape) {
  FusedGemm gemm{};
  gemm.b = b.data();
  gemm.m = shape.m;
  gemm.n = gemm.ldd = shape.n;
  gemm.k = gemm.lda = gemm.ldb = shape.k;
  gemm.b_transposed = true;
  gemm.dtype = kernels::DataType::kBFloat16;
  return gemm;
}

// One call of every rank: `enqueue` is given the rank and its call's streams.
template <typename Enqueue>
void call_all(testing::VirtualRanks& ranks, const Enqueue& enqueue) {
  for (int r = 0; r < ranks.size(); ++r) {
    const testing::DeviceGuard guard(r);
    auto& rank = ranks[r];
    kernels::cuda::CallOrder::Turn turn(rank.order, rank.compute.get());
    enqueue(r, rank.copies.behind(rank.compute.get()));
    turn.end();
  }
}

void check_fused(int64_t block_n, bool gathers, Shape shape, uint64_t seed) {
  SCOPED_TRACE((gathers ? "gather, tile of " : "sum, tile of ") + std::to_string(block_n) +
               " columns, depth " + std::to_string(shape.k) + ", seed " + std::to_string(seed));
  RuntimeOptions options;
  options.machine.seed = seed;
  options.devices = kRanks;
  Runtime runtime(options);
  testing::VirtualRanks ranks(kRanks, 0, 1, tn_backend());
  ranks.grow(2 * shape.m * std::max(shape.k, shape.n), 0xFFFFFFFE);  // epochs wrap
  std::mt19937_64 random(seed);
  const comm::ChunkPlan plan{shape.m, kRanks, 1};
  kernels::LaunchConfig config = kernels::sm90::gemm_bf16_tn()[0].config;
  config.block_n = static_cast<int>(block_n);
  config.num_ctas = shape.n == kFused.n ? 4 : 2;
  for (int call = 0; call < 3; ++call) {
    const Matrix whole = Matrix::random(shape.m, shape.k, random);
    Matrix sum{shape.m, shape.n, std::vector<float>(static_cast<size_t>(shape.m * shape.n))};
    std::vector<DeviceMatrix> as, bs, ds;
    std::vector<Matrix> products;
    for (int r = 0; r < kRanks; ++r) {
      const testing::DeviceGuard guard(r);
      const int64_t rows = shape.m / kRanks;
      const Matrix a = gathers ? whole.row_range(r * rows, (r + 1) * rows)
                               : Matrix::random(shape.m, shape.k, random);
      const Matrix b = Matrix::random(shape.k, shape.n, random);
      as.emplace_back(a);
      bs.emplace_back(transposed(b));
      ds.emplace_back(gathers ? shape.m : rows, shape.n);
      products.push_back(stored((gathers ? whole : a) * b));
      sum = sum + products.back();
    }
    kernels::cuda::CopyEnginePush push;
    call_all(ranks, [&](int r, const kernels::cuda::CallStreams& streams) {
      const auto at = static_cast<size_t>(r);
      FusedGemm gemm = fused_gemm(bs[at], shape);
      if (gathers) {
        gemm.d = ds[at].data();
        kernels::cuda::all_gather_gemm(ranks[r].peers, ranks.backend, config, gemm,
                                       kernels::cuda::Arriving::kRows,
                                       {as[at].data(), shape.k * 2, plan, true}, push, streams);
      } else {
        gemm.a = as[at].data();
        kernels::cuda::gemm_reduce_scatter(ranks[r].peers, ranks.backend, config, gemm,
                                           ds[at].data(), streams);
      }
    });
    for (int d = 0; d < kRanks; ++d) {
      const testing::DeviceGuard guard(d);
      (void)cudaDeviceSynchronize();
      if (runtime.failure()) FAIL() << runtime.failure()->what();
    }
    for (int r = 0; r < kRanks; ++r) {
      const testing::DeviceGuard guard(r);
      const auto at = static_cast<size_t>(r);
      const int64_t rows = shape.m / kRanks;
      EXPECT_EQ(ds[at].read(),
                gathers ? products[at] : stored(sum.row_range(r * rows, (r + 1) * rows)));
    }
  }
}

TEST(Gemms, RowsThatArriveAndRowsThatLeave) {
  for (const int64_t block_n : {256, 128}) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      check_fused(block_n, true, kFused, seed);
      check_fused(block_n, false, kFused, seed);
    }
    for (const Shape shape : {kDeep, kShallow}) {
      check_fused(block_n, true, shape, 3);
      check_fused(block_n, false, shape, 3);
    }
  }
}

#else

TEST(Gemms, RowsThatArriveAndRowsThatLeave) {
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
}

TEST(Gemms, ProductsThatStay) {
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
}

#endif

}  // namespace
}  // namespace axonn::gpu_machine
