// The project's Triton matmuls, as compiled by Triton for sm_80 and sm_90, against products in
// double.
#include <gtest/gtest.h>

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

constexpr uint64_t kTritonSeeds = 2;
constexpr uint32_t kPrograms = 3;  // fewer than tiles, so some programs compute several

TEST(Triton, KernelsWereCompiled) {
  if (testing::kTritonFolder.empty()) {
    GTEST_SKIP() << "triton was not found when this was built, so its kernels are not run";
  }
  EXPECT_FALSE(testing::triton_cases().empty()) << testing::kTritonFolder;
}

struct Sizes {
  int64_t m, n, k;
};

// Larger than one or two tiles, and multiples of 16 only if the kernel was compiled for that.
Sizes sizes_of(const TritonCase& what) {
  Sizes sizes = what.is_true("aligned") ? Sizes{176, 272, 400} : Sizes{133, 202, 77};
  const std::string& ones = what.text("ones");
  if (ones.find('m') != std::string::npos) sizes.m = 1;
  if (ones.find('n') != std::string::npos) sizes.n = 1;
  if (ones.find('k') != std::string::npos) sizes.k = 1;
  return sizes;
}

void lay_out(Matrix& matrix, char layout, bool aligned) {
  const auto pitch = [&](int64_t length) { return aligned ? length + 16 : length + 3; };
  if (layout == 'N') {
    matrix.row_stride = pitch(matrix.columns);
  } else if (layout == 'T') {
    matrix.row_stride = 1;
    matrix.column_stride = pitch(matrix.rows);
  } else {
    matrix.column_stride = 2;
    matrix.row_stride = 2 * matrix.columns + 5;
  }
}

// Applies the kernel's epilogue to the sums of a row.
std::vector<Expected> finished(const TritonCase& what, std::vector<Expected> sums,
                               const Matrix& bias) {
  if (!what.is_true("bias")) return sums;
  for (size_t j = 0; j < sums.size(); ++j) {
    sums[j].value += bias.values[j];
    sums[j].bound += 0x1p-24 * std::abs(sums[j].value);
  }
  return sums;
}

void expect_row(const std::vector<double>& got, size_t row, const std::vector<Expected>& expected,
                DataType dtype, int& wrong) {
  for (size_t j = 0; j < expected.size(); ++j) {
    const Expected& one = expected[j];
    const double value = got[row * expected.size() + j];
    const double bound = one.bound + testing::step_of(dtype) * (std::abs(one.value) + one.bound) +
                         (dtype == DataType::kFloat16 ? 0x1p-25 : 0);
    if (std::abs(value - one.value) <= bound) continue;
    if (++wrong < 5) {
      ADD_FAILURE() << "row " << row << ", column " << j << ": " << value << ", expected "
                    << one.value << " up to " << bound;
    }
  }
}

// Runs the kernel in this PTX, and returns how many elements are wrong.
int run_matmul(const TritonCase& what, const std::string& ptx, uint64_t seed) {
  std::mt19937_64 random(seed + 1);
  const Sizes sizes = sizes_of(what);
  const DataType dtype = what.dtype();
  Options options;
  options.seed = seed;
  Machine machine(options);
  machine.load(ptx);
  Matrix a = testing::draw_matrix(sizes.m, sizes.k, dtype, random);
  Matrix b = testing::draw_matrix(sizes.k, sizes.n, dtype, random);
  Matrix bias = testing::draw_matrix(1, sizes.n, dtype, random);
  lay_out(a, what.text("layout")[0], what.is_true("aligned"));
  lay_out(b, what.text("layout")[1], what.is_true("aligned"));
  testing::place_matrix(machine, a, "a");
  testing::place_matrix(machine, b, "b");
  testing::place_matrix(machine, bias, "bias");
  const int64_t parts = what.number("SPLIT_K");
  const DataType stored = parts > 1 ? DataType::kFloat32 : dtype;
  const auto count = static_cast<size_t>(parts * sizes.m * sizes.n);
  const uint64_t c =
      machine.memory().allocate(count * static_cast<size_t>(kernels::size_of(stored)), "c");
  TritonArguments arguments;
  testing::set_matrix(arguments, what, "a", a);
  testing::set_matrix(arguments, what, "b", b);
  arguments.set("c_ptr", c);
  arguments.set("bias_ptr", bias.address);
  arguments.set("m", sizes.m);
  arguments.set("n", sizes.n);
  arguments.set("k", sizes.k);
  arguments.set("stride_am", a.row_stride);
  arguments.set("stride_ak", a.column_stride);
  arguments.set("stride_bk", b.row_stride);
  arguments.set("stride_bn", b.column_stride);
  testing::launch_triton(machine, machine.new_stream(0), what, arguments, kPrograms);
  machine.run();

  std::vector<double> got = testing::read_values(machine, c, count, stored);
  const size_t size = count / static_cast<size_t>(parts);
  for (size_t i = size; i < count; ++i) got[i % size] += got[i];  // adds the parts of a split K
  int wrong = 0;
  for (int64_t i = 0; i < sizes.m; ++i) {
    std::vector<Expected> sums;
    for (int64_t j = 0; j < sizes.n; ++j) sums.push_back(testing::product_at(a, b, i, j));
    expect_row(got, static_cast<size_t>(i), finished(what, sums, bias), stored, wrong);
  }
  return wrong;
}

class TritonMatmul : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonMatmul);

TEST_P(TritonMatmul, IsTheProduct) {
  for (uint64_t seed = 0; seed < kTritonSeeds; ++seed) {
    EXPECT_EQ(run_matmul(GetParam(), testing::fenced_ptx_of(GetParam()), seed), 0)
        << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TritonMatmul, ::testing::ValuesIn(testing::triton_cases_of("matmul")),
                         testing::name_of_case);

// Every tile size, with one seed.
class EveryTritonMatmul : public TritonMatmul {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EveryTritonMatmul);

TEST_P(EveryTritonMatmul, IsTheProduct) {
  EXPECT_EQ(run_matmul(GetParam(), testing::fenced_ptx_of(GetParam()), 0), 0);
}

INSTANTIATE_TEST_SUITE_P(Slow, EveryTritonMatmul,
                         ::testing::ValuesIn(testing::triton_cases_of("matmul",
                                                                      testing::kAllTritonFolder)),
                         testing::name_of_case);

// Cases with mbarriers, and with no other fences after their initialization.
std::vector<TritonCase> cases_by_tma() {
  std::vector<TritonCase> cases = testing::triton_cases_of("matmul");
  std::erase_if(cases, [](const TritonCase& what) {
    return !what.facts.contains("a.box") || what.number("SPLIT_K") != 1;
  });
  return cases;
}

class TritonMatmulByTma : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonMatmulByTma);
INSTANTIATE_TEST_SUITE_P(All, TritonMatmulByTma, ::testing::ValuesIn(cases_by_tma()),
                         testing::name_of_case);

TEST_P(TritonMatmulByTma, AFenceBehindTheInitializationOfBarriersIsMissing) {
  const TritonCase& what = GetParam();
  try {
    run_matmul(what, testing::ptx_of(what), 0);
    ADD_FAILURE() << "Triton has a fence there now: fenced_ptx_of is not needed any more";
  } catch (const MachineError& error) {
    EXPECT_NE(std::string(error.what()).find("fence.mbarrier_init"), std::string::npos)
        << error.what();
  }
}

class TritonSplitK : public ::testing::TestWithParam<TritonCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TritonSplitK);

TEST_P(TritonSplitK, AddsTheParts) {
  const TritonCase& what = GetParam();
  std::mt19937_64 random(11);
  const int64_t m = 48, n = 176, parts = what.number("SPLIT_K");
  Machine machine;
  machine.load(testing::fenced_ptx_of(what));
  Matrix split = testing::draw_matrix(parts * m, n, DataType::kFloat32, random);
  Matrix bias = testing::draw_matrix(1, n, what.dtype(), random);
  testing::place_matrix(machine, split, "parts");
  testing::place_matrix(machine, bias, "bias");
  const auto count = static_cast<size_t>(m * n);
  const uint64_t c =
      machine.memory().allocate(count * static_cast<size_t>(kernels::size_of(what.dtype())), "c");
  TritonArguments arguments;
  arguments.set("parts_ptr", split.address);
  arguments.set("c_ptr", c);
  arguments.set("bias_ptr", bias.address);
  arguments.set("m", m);
  arguments.set("n", n);
  arguments.set("part_stride", m * n);
  const auto tiles_of = [&](int64_t size, const char* block) {
    return static_cast<uint32_t>((size + what.number(block) - 1) / what.number(block));
  };
  testing::launch_triton(machine, machine.new_stream(0), what, arguments,
                         tiles_of(m, "BLOCK_M") * tiles_of(n, "BLOCK_N"));
  machine.run();
  const auto got = testing::read_values(machine, c, count, what.dtype());
  int wrong = 0;
  for (int64_t i = 0; i < m; ++i) {
    std::vector<Expected> sums(static_cast<size_t>(n));
    for (int64_t j = 0; j < n; ++j) {
      Expected& sum = sums[static_cast<size_t>(j)];
      for (int64_t part = 0; part < parts; ++part) {
        sum.value += split.at(part * m + i, j);
        sum.bound += static_cast<double>(parts) * 0x1p-24 * std::abs(split.at(part * m + i, j));
      }
    }
    expect_row(got, static_cast<size_t>(i), finished(what, sums, bias), what.dtype(), wrong);
  }
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(All, TritonSplitK,
                         ::testing::ValuesIn(testing::triton_cases_of("split_k_reduce")),
                         testing::name_of_case);
INSTANTIATE_TEST_SUITE_P(Slow, TritonSplitK,
                         ::testing::ValuesIn(testing::triton_cases_of("split_k_reduce",
                                                                      testing::kAllTritonFolder)),
                         testing::name_of_case);

}  // namespace
}  // namespace axonn::gpu_machine
