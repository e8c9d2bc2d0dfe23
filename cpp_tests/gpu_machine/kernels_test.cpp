// The project's kernels, as nvcc compiles them, against the CPU's functions of csrc/core/numeric.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/numeric/block_layout.h"
#include "core/numeric/goldfish.h"
#include "core/numeric/philox.h"
#include "gpu_machine/kernel_ptx.h"
#include "gpu_machine/kernel_values.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

using kernels::BlockLayout;
using kernels::DataType;

using testing::device_pointer;
using testing::kFloats;
using testing::mangled;
using testing::step_of;
using testing::value_at;
using Kernels = testing::KernelTest;

// --- fill_random ---

struct FillParams {  // as in fill_random.cu
  BlockLayout layout;
  kernels::RandomStream stream;
  int64_t counters_per_row;
};

void check_fill(Machine& machine, int stream, DataType dtype, const kernels::RandomStream& random) {
  const int64_t full[] = {7, 3, 29}, offsets[] = {1, 1, 5}, sizes[] = {5, 2, 19};
  const auto layout = BlockLayout::of(full, offsets, sizes, 3);
  const auto count = static_cast<size_t>(layout.rows * layout.columns);
  const auto size = static_cast<size_t>(kernels::size_of(dtype));
  const uint64_t out = machine.memory().allocate(count * size, "out");
  const FillParams params{layout, random, (layout.columns + 6) / 4};
  machine.launch(stream, machine.kernel("fill_kernel" + mangled(dtype)), {2, 1, 1}, {256, 1, 1},
                 out, params);
  machine.run();
  const auto got = machine.get<std::byte>(out, count * size);
  std::vector<std::byte> want(count * size);
  for (int64_t row = 0; row < layout.rows; ++row) {
    kernels::fill_random(want.data() + static_cast<size_t>(row * layout.columns) * size,
                         layout.row_start(row), layout.columns, dtype, random);
  }
  // Uniform: nvcc contracts a + (b - a) u, so each side errs by at most two units. Normal: the
  // logarithm, the root and the turn err by some units on either side, and a number is at most 6.7
  // deviations away from the mean. Then both are rounded once more.
  const bool is_normal = random.distribution == kernels::Distribution::kNormal;
  const double largest = std::abs(random.a) + (is_normal ? 6.7 : 1) * std::abs(random.b);
  const double drawn = (is_normal ? 16 : 4) * 0x1p-24 * largest;
  for (size_t i = 0; i < count; ++i) {
    const double a = value_at(got, i, dtype), b = value_at(want, i, dtype);
    const double rounded = dtype == DataType::kInt64 ? 1 : 2 * step_of(dtype) * std::abs(b);
    EXPECT_NEAR(a, b, drawn + rounded) << name_of(dtype) << " " << i;
  }
}

TEST_F(Kernels, FillRandomDrawsWhatTheCpuDraws) {
  Machine machine;
  machine.load(ptx("fill_random"));
  const int stream = machine.new_stream(0);
  for (const auto distribution :
       {kernels::Distribution::kUniform, kernels::Distribution::kNormal}) {
    const uint64_t name = kernels::hash_name("w");
    for (const auto dtype : kFloats) {
      check_fill(machine, stream, dtype, {12345, name, distribution, -0.5f, 1.5f});
    }
    check_fill(machine, stream, DataType::kInt64, {12345, name, distribution, -1e6f, 1e6f});
  }
}

// --- Goldfish ---

struct GoldfishParams {  // as in goldfish.cu
  kernels::GoldfishRows rows;
  kernels::GoldfishRule rule;
  int64_t ignore_index;
  uint64_t out;
};

TEST_F(Kernels, GoldfishLabelsAreTheCpus) {
  std::mt19937_64 random(13);
  Machine machine;
  machine.load(ptx("goldfish"));
  const int stream = machine.new_stream(0);
  constexpr int64_t kRows = 3, kLength = 150;
  std::vector<int64_t> ids(kRows * kLength), documents(kRows * kLength);
  for (auto& id : ids) id = static_cast<int64_t>(random() % 50000);
  for (size_t i = 0; i < documents.size(); ++i) documents[i] = static_cast<int64_t>(i / 47);
  const auto* device_ids = static_cast<const int64_t*>(device_pointer(machine.put(ids, "ids")));
  const auto* device_documents =
      static_cast<const int64_t*>(device_pointer(machine.put(documents, "documents")));
  for (const bool has_documents : {false, true}) {
    for (const bool with_target : {false, true}) {
      const auto rule = kernels::GoldfishRule::of(4, 13, with_target);
      const kernels::GoldfishRows rows{ids.data(), has_documents ? documents.data() : nullptr,
                                       kRows, kLength};
      const auto count = static_cast<size_t>(rows.num_targets());
      const uint64_t out = machine.memory().allocate(8 * count, "out");
      const GoldfishParams params{
          {device_ids, has_documents ? device_documents : nullptr, kRows, kLength},
          rule,
          -100,
          out};
      machine.launch(stream, machine.kernel("goldfish_kernel"), {1, 1, 1}, {256, 1, 1}, params);
      machine.run();
      std::vector<int64_t> want(count);
      kernels::goldfish_labels(rows, rule, -100, 0, rows.num_targets(), want.data());
      EXPECT_EQ(machine.get<int64_t>(out, count), want);
      EXPECT_NE(std::count(want.begin(), want.end(), -100), 0);
    }
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
