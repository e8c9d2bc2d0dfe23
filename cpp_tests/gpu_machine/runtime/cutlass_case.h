// A product by one of CUTLASS's GEMMs on the runtime, checked against sums in double. Values are
// small integers, so every sum is exact in float32 and in 16 bits, in any order.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "gpu_machine/kernel_values.h"
#include "gpu_machine/runtime/cutlass_gemm.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine::testing {

struct CutlassSizes {
  int m, n, k, num_ctas;
};

inline std::vector<double> draw_integers(int64_t count, std::mt19937_64& random) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = static_cast<double>(random() % 3) - 1;
  return values;
}

// A packed matrix on the device, stored by rows or by columns; values are [rows][columns].
inline void* put_matrix(const std::vector<double>& values, int rows, int columns, bool by_rows,
                        DataType dtype) {
  std::vector<std::byte> bytes(values.size() * 2);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      const int at = by_rows ? i * columns + j : j * rows + i;
      put_value(bytes, static_cast<size_t>(at), dtype,
                values[static_cast<size_t>(i * columns + j)]);
    }
  }
  void* address = nullptr;
  EXPECT_EQ(cudaMalloc(&address, bytes.size()), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(address, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), cudaSuccess);
  return address;
}

// The inputs of a GEMM, on the device of the current runtime.
struct CutlassData {
  CutlassData(const CutlassGemm& gemm, CutlassSizes sizes, uint64_t seed)
      : random(seed),
        a(draw_integers(int64_t{sizes.m} * sizes.k, random)),
        b(draw_integers(int64_t{sizes.k} * sizes.n, random)),
        c(draw_integers(int64_t{sizes.m} * sizes.n, random)),
        dtype(gemm.is_half ? DataType::kFloat16 : DataType::kBFloat16) {
    problem.a = put_matrix(a, sizes.m, sizes.k, gemm.a_by_rows, dtype);
    problem.b = put_matrix(b, sizes.k, sizes.n, gemm.b_by_rows, dtype);
    problem.c = put_matrix(c, sizes.m, sizes.n, true, dtype);
    EXPECT_EQ(cudaMalloc(&problem.d, bytes()), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&problem.workspace, kCutlassWorkspaceBytes), cudaSuccess);
    problem.m = sizes.m;
    problem.n = sizes.n;
    problem.k = sizes.k;
    problem.num_ctas = sizes.num_ctas;
  }
  size_t bytes() const { return c.size() * 2; }

  std::mt19937_64 random;
  const std::vector<double> a, b, c;
  const DataType dtype;
  CutlassProblem problem{};
};

// Makes `calls` calls, each of which adds to the result of the one before and may begin early.
inline void check_cutlass_gemm(const CutlassGemm& gemm, CutlassSizes sizes, uint64_t seed,
                               int calls = 1, bool checks_races = true) {
  const auto [m, n, k, num_ctas] = sizes;
  SCOPED_TRACE(std::string(gemm.name) + ", " + std::to_string(m) + " x " + std::to_string(n) +
               " x " + std::to_string(k) + ", seed " + std::to_string(seed));
  RuntimeOptions options;
  options.machine.seed = seed;
  options.machine.checks_races = checks_races;
  options.devices = 1;
  Runtime runtime(options);
  CutlassData data(gemm, sizes, seed);
  for (int call = 0; call < calls; ++call) {
    data.problem.overlaps = call > 0;
    if (call > 0) {
      data.problem.c = data.problem.d;
      ASSERT_EQ(cudaMalloc(&data.problem.d, data.bytes()), cudaSuccess);
    }
    const cudaError_t launched = gemm.run(data.problem, nullptr);
    if (runtime.failure()) FAIL() << runtime.failure()->what();
    ASSERT_EQ(launched, cudaSuccess);
  }
  std::vector<std::byte> got(data.bytes());
  const cudaError_t status =
      cudaMemcpy(got.data(), data.problem.d, got.size(), cudaMemcpyDeviceToHost);
  if (runtime.failure()) FAIL() << runtime.failure()->what();
  ASSERT_EQ(status, cudaSuccess);
  int wrong = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      const auto at = static_cast<size_t>(i * n + j);
      double product = 0;
      for (int p = 0; p < k; ++p) {
        product += data.a[static_cast<size_t>(i * k + p)] * data.b[static_cast<size_t>(p * n + j)];
      }
      const double sum = data.c[at] + calls * product;
      const double value = value_at(got, at, data.dtype);
      if (value == sum || ++wrong > 4) continue;
      ADD_FAILURE() << "row " << i << ", column " << j << ": " << value << ", expected " << sum;
    }
  }
  EXPECT_EQ(wrong, 0);
}

// Whole tiles, ragged tiles, more depth than there are stages, and several tiles per CTA.
inline void check_cutlass_gemm(const CutlassGemm& gemm, bool checks_races = true) {
  const int unit = gemm.alignment;
  const CutlassSizes ragged{128 + 9 * unit, 64 + 7 * unit, 64 + 3 * unit, 4};
  check_cutlass_gemm(gemm, {256, 128, 128, 4}, 1, 1, checks_races);
  check_cutlass_gemm(gemm, ragged, 2, 1, checks_races);
  check_cutlass_gemm(gemm, {384, 192, 704, 2}, 3, 1, checks_races);
}

}  // namespace axonn::gpu_machine::testing
