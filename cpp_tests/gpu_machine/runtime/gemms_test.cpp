// The GEMMs for sm_90, of CUTLASS's kernels and host code: compiled as they are built for a GPU, and
// executed instruction by instruction. Values are small integers, so that every sum is exact in
// fp32 and in bfloat16, in any order.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "core/cuda/sm90/instances.h"
#include "core/cuda/sm90/plans.h"
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
    check_product(instance, {256, 256, 448}, true, 4, 2);   // more depth than there are stages
    check_product(instance, {200, 136, 72}, true, 2, 3);    // ragged everywhere
    check_product(instance, {8, 8, 8}, false, 2, 4);
    check_product(instance, {640, 520, 128}, true, 4, 5);   // several tiles for each CTA
  }
}

#else

TEST(Gemms, ProductsThatStay) {
  GTEST_SKIP() << "CUTLASS_HOME does not lead to CUTLASS, which the GEMMs are made of";
}

#endif

}  // namespace
}  // namespace axonn::gpu_machine
