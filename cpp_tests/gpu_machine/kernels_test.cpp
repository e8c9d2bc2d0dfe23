// The project's kernels, as compiled by nvcc, against the CPU functions of csrc/core/numeric.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/numeric/block_layout.h"
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
  // Uniform: nvcc contracts a + (b - a) u, so each side is off by at most two units. Normal: on
  // either side the logarithm, the root and the rotation are off by some units, and a number is at
  // most 6.7 deviations away from the mean. Both are then rounded once more.
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

}  // namespace
}  // namespace axonn::gpu_machine
