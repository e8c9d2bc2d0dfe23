// The project's kernels, as nvcc compiles them, against the CPU's functions of csrc/core/numeric.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/cuda/cross_entropy.h"
#include "core/numeric/block_layout.h"
#include "core/numeric/cross_entropy.h"
#include "core/numeric/goldfish.h"
#include "core/numeric/philox.h"
#include "core/numeric/reduce.h"
#include "gpu_machine/kernel_ptx.h"

namespace axonn::gpu_machine {
namespace {

using kernels::BlockLayout;
using kernels::DataType;

constexpr DataType kFloats[] = {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                                DataType::kFloat16};

// How the name of a template's instance says its type.
std::string mangled(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return "If";
    case DataType::kFloat64:
      return "Id";
    case DataType::kBFloat16:
      return "I13__nv_bfloat16";
    case DataType::kFloat16:
      return "I6__half";
    case DataType::kInt64:
      return "Il";
  }
  return "?";
}

double value_at(const std::vector<std::byte>& bytes, size_t i, DataType dtype) {
  return kernels::logit_at(bytes.data(), static_cast<int64_t>(i), dtype);
}

void put_value(std::vector<std::byte>& bytes, size_t i, DataType dtype, double value) {
  const auto put = [&](auto number) {
    std::memcpy(bytes.data() + i * sizeof(number), &number, sizeof(number));
  };
  const auto narrow = static_cast<float>(value);
  if (dtype == DataType::kFloat32) put(narrow);
  if (dtype == DataType::kFloat64) put(value);
  if (dtype == DataType::kBFloat16) put(kernels::BFloat16::from_float(narrow));
  if (dtype == DataType::kFloat16) put(kernels::Float16::from_float(narrow));
  if (dtype == DataType::kInt64) put(static_cast<int64_t>(value * 1e15));
}

std::vector<std::byte> draw(size_t count, DataType dtype, std::mt19937_64& random, double scale) {
  std::vector<std::byte> bytes(count * static_cast<size_t>(kernels::size_of(dtype)));
  std::normal_distribution<double> normal(0, scale);
  for (size_t i = 0; i < count; ++i) put_value(bytes, i, dtype, normal(random));
  return bytes;
}

// Half the distance of neighbours, relatively, and what is added where numbers are tiny.
double step_of(DataType dtype) {
  return dtype == DataType::kFloat64    ? 0x1p-53
         : dtype == DataType::kFloat32  ? 0x1p-24
         : dtype == DataType::kBFloat16 ? 0x1p-8
                                        : 0x1p-11;
}

using Kernels = testing::KernelTest;

// --- fill_random -----------------------------------------------------------------------------------

struct FillParams {  // as in fill_random.cu
  BlockLayout layout;
  kernels::RandomStream stream;
  int64_t counters_per_row;
};

TEST_F(Kernels, FillRandomDrawsWhatTheCpuDraws) {
  Machine machine;
  load(machine, "fill_random");
  const int stream = machine.new_stream(0);
  const int64_t full[] = {7, 3, 29}, offsets[] = {1, 1, 5}, sizes[] = {5, 2, 19};
  const auto layout = BlockLayout::of(full, offsets, sizes, 3);
  const auto count = static_cast<size_t>(layout.rows * layout.columns);
  for (const auto distribution : {kernels::Distribution::kUniform, kernels::Distribution::kNormal}) {
    const kernels::RandomStream random{12345, kernels::hash_name("w"), distribution, -0.5f, 1.5f};
    for (const auto dtype : kFloats) {
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
      for (size_t i = 0; i < count; ++i) {
        // The logarithm, the root and the turn each err by some units of fp32 on either side; a
        // normal number is at most 1.5 * 5.7 away from the mean. Then both are rounded once more.
        const double a = value_at(got, i, dtype), b = value_at(want, i, dtype);
        EXPECT_NEAR(a, b, 16 * 0x1p-24 * 8.6 + 2 * step_of(dtype) * std::abs(b))
            << name_of(dtype) << " " << i;
      }
    }
  }
}

// --- reduce ----------------------------------------------------------------------------------------

struct Slots {  // as in reduce.cu
  uint64_t sources[256];
  int64_t num_sources;
};

TEST_F(Kernels, SumsAndMaximaHaveTheCpusBits) {
  std::mt19937_64 random(7);
  Machine machine;
  load(machine, "reduce");
  const int stream = machine.new_stream(0);
  constexpr size_t kCount = 1000;
  for (const auto op : {kernels::ReduceOp::kSum, kernels::ReduceOp::kMax}) {
    for (const auto dtype : {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                             DataType::kFloat16, DataType::kInt64}) {
      for (const int64_t num_sources : {1, 3, 9}) {
        const auto size = static_cast<size_t>(kernels::size_of(dtype));
        std::vector<std::vector<std::byte>> values;
        std::vector<const void*> pointers;
        Slots slots{};
        slots.num_sources = num_sources;
        for (int64_t s = 0; s < num_sources; ++s) {
          values.push_back(draw(kCount, dtype, random, 3));
          slots.sources[s] = machine.put(values.back(), "source");
        }
        for (const auto& source : values) pointers.push_back(source.data());
        const uint64_t out = machine.memory().allocate(kCount * size, "out");
        // Vectors of 16 bytes, then the rest one by one.
        const auto width = static_cast<int64_t>(16 / size);
        const int64_t vectors = 900 / width;
        const auto kernel = [&](int64_t lanes) {
          const std::string type = dtype == DataType::kInt64 ? "Ix" : mangled(dtype);
          return machine.kernel("reduce_kernel" + type + "Li" + std::to_string(lanes) + "ELNS0_8ReduceOpE" +
                                std::to_string(static_cast<int>(op)));
        };
        machine.launch(stream, kernel(width), {3, 1, 1}, {256, 1, 1}, out, slots, vectors);
        const auto done = static_cast<uint64_t>(vectors * width);
        Slots rest = slots;
        for (int64_t s = 0; s < num_sources; ++s) rest.sources[s] += done * size;
        machine.launch(stream, kernel(1), {1, 1, 1}, {256, 1, 1}, out + done * size, rest,
                       static_cast<int64_t>(kCount - done));
        machine.run();
        std::vector<std::byte> want(kCount * size);
        kernels::reduce_slots(want.data(), pointers.data(), num_sources, kCount, dtype, op);
        EXPECT_EQ(machine.get<std::byte>(out, kCount * size), want)
            << name_of(dtype) << " " << num_sources;
      }
    }
  }
}

// --- cross-entropy ---------------------------------------------------------------------------------

struct GradientParams {  // as in cross_entropy.cu
  kernels::cuda::LogitRows rows;
  uint64_t dy, statistics, out;
  int64_t out_row_stride;
};

void* device_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

TEST_F(Kernels, CrossEntropyEqualsTheCpus) {
  std::mt19937_64 random(11);
  constexpr int64_t kRows = 5, kIgnored = -100, kFirst = 1000;
  for (const auto dtype : kFloats) {
    for (const int64_t columns : {1, 37, 2100}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(columns));
      Options options;
      options.seed = static_cast<uint64_t>(columns);
      Machine machine(options);
      load(machine, "cross_entropy");
      const int stream = machine.new_stream(0);
      const auto size = static_cast<size_t>(kernels::size_of(dtype));
      const int64_t stride = columns + 3;  // rows begin anywhere
      const auto elements = static_cast<size_t>(kRows * stride);
      const auto logits = draw(elements, dtype, random, 4);
      std::vector<int64_t> labels(kRows);
      for (int64_t r = 0; r < kRows; ++r) {
        labels[static_cast<size_t>(r)] = kFirst + static_cast<int64_t>(random() % static_cast<uint64_t>(columns));
      }
      labels[1] = kIgnored;
      labels[2] = kFirst - 1;  // another rank's
      const uint64_t device_logits = machine.put(logits, "logits");
      const kernels::cuda::LogitRows rows{
          device_pointer(device_logits),
          static_cast<const int64_t*>(device_pointer(machine.put(labels, "labels"))),
          kRows, columns, stride, kFirst, kIgnored};
      const bool wide = dtype == DataType::kFloat64;
      const size_t acc = wide ? 8 : 4;
      const DataType acc_type = wide ? DataType::kFloat64 : DataType::kFloat32;
      const uint64_t found = machine.memory().allocate(3 * kRows * acc, "found");
      machine.launch(stream, machine.kernel("scan_kernel" + mangled(dtype)), {3, 1, 1},
                     {256, 1, 1}, rows, found);
      const std::vector<double> dy{0.5, 0.25, -1, 2, 0.125};
      std::vector<std::byte> narrow_dy(kRows * acc);
      for (size_t r = 0; r < kRows; ++r) put_value(narrow_dy, r, acc_type, dy[r]);
      const uint64_t out = machine.memory().allocate(elements * size, "out");
      const GradientParams params{rows, machine.put(narrow_dy, "dy"), found, out, stride};
      machine.launch(stream, machine.kernel("gradient_kernel" + mangled(dtype)), {2, 1, 1},
                     {256, 1, 1}, params);
      machine.run();

      const auto statistics = machine.get<std::byte>(found, 3 * kRows * acc);
      // An exponential errs by up to 2 units, __expf by 2 + 1.16 |x| units of its argument's
      // product; |x| is below 40 here. The rest is what sums in another order differ by.
      const double unit = wide ? 0x1p-52 : 0x1p-23;
      const double bound = (size == 2 ? 64 : 24) * unit;
      for (size_t r = 0; r < kRows; ++r) {
        const auto* row = logits.data() + r * static_cast<size_t>(stride) * size;
        const auto got = [&](size_t which) { return value_at(statistics, which * kRows + r, acc_type); };
        std::vector<std::byte> want(static_cast<size_t>(columns) * size);
        if (labels[r] == kIgnored) {
          EXPECT_EQ(got(0), 0);
          EXPECT_EQ(got(1), 1);
        } else {
          const auto scan = kernels::scan_logits(row, columns, dtype);
          EXPECT_EQ(got(0), scan.top);
          EXPECT_NEAR(got(1) / scan.sum, 1, bound);
          const int64_t label = labels[r] < kFirst ? -1 : labels[r] - kFirst;
          EXPECT_EQ(got(2), label < 0 ? 0 : kernels::logit_at(row, label, dtype));
          kernels::cross_entropy_gradient(want.data(), row, columns, dtype, scan, dy[r], label);
        }
        const auto gradient = machine.get<std::byte>(
            out + r * static_cast<size_t>(stride) * size, static_cast<size_t>(columns) * size);
        for (size_t c = 0; c < static_cast<size_t>(columns); ++c) {
          const double a = value_at(gradient, c, dtype), b = value_at(want, c, dtype);
          // The label's element is a difference of two numbers up to |dy|; halves below 2^-14 are
          // 2^-24 apart.
          const double small = dtype == DataType::kFloat16 ? 0x1p-24 : 0x1p-125;
          ASSERT_NEAR(a, b, bound * std::abs(dy[r]) + 2 * step_of(dtype) * std::abs(b) + small)
              << "row " << r << " column " << c;
        }
      }
    }
  }
}

// --- Goldfish --------------------------------------------------------------------------------------

struct GoldfishParams {  // as in goldfish.cu
  kernels::GoldfishRows rows;
  kernels::GoldfishRule rule;
  int64_t ignore_index;
  uint64_t out;
};

TEST_F(Kernels, GoldfishLabelsAreTheCpus) {
  std::mt19937_64 random(13);
  Machine machine;
  load(machine, "goldfish");
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
      const kernels::GoldfishRows rows{ids.data(), has_documents ? documents.data() : nullptr, kRows,
                                       kLength};
      const auto count = static_cast<size_t>(rows.num_targets());
      const uint64_t out = machine.memory().allocate(8 * count, "out");
      const GoldfishParams params{
          {device_ids, has_documents ? device_documents : nullptr, kRows, kLength}, rule, -100, out};
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
