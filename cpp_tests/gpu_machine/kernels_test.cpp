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
#include "gpu_machine/machine.h"

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
  if (dtype == DataType::kInt64) {
    int64_t value = 0;
    std::memcpy(&value, bytes.data() + i * sizeof(value), sizeof(value));
    return static_cast<double>(value);
  }
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

// --- fill_random
// -----------------------------------------------------------------------------------

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

// --- reduce
// ----------------------------------------------------------------------------------------

struct Slots {  // as in reduce.cu
  uint64_t sources[256];
  int64_t num_sources;
};

TEST_F(Kernels, SumsAndMaximaHaveTheCpusBits) {
  std::mt19937_64 random(7);
  Machine machine;
  machine.load(ptx("reduce"));
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
          return machine.kernel("reduce_kernel" + type + "Li" + std::to_string(lanes) +
                                "ELNS0_8ReduceOpE" + std::to_string(static_cast<int>(op)));
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

// --- cross-entropy
// ---------------------------------------------------------------------------------

struct GradientParams {  // as in cross_entropy.cu
  kernels::cuda::LogitRows rows;
  uint64_t dy, statistics, out;
  int64_t out_row_stride;
};

void* device_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Logits, their scan and their gradient, on the machine and on the CPU.
class CrossEntropyRun {
 public:
  CrossEntropyRun(const std::string& ptx, DataType dtype, int64_t columns, uint64_t seed)
      : dtype_(dtype), columns_(columns), stride_(columns + 3), machine_({seed}) {
    std::mt19937_64 random(seed);
    machine_.load(ptx);
    logits_ = draw(static_cast<size_t>(kRows * stride_), dtype, random, 4);
    for (int64_t r = 0; r < kRows; ++r) {
      labels_.push_back(kFirst + static_cast<int64_t>(random() % static_cast<uint64_t>(columns)));
    }
    labels_[1] = kIgnored;
    labels_[2] = kFirst - 1;  // another rank's
  }

  void run() {
    const int stream = machine_.new_stream(0);
    const uint64_t logits = machine_.put(logits_, "logits");
    const uint64_t labels = machine_.put(labels_, "labels");
    const kernels::cuda::LogitRows rows{device_pointer(logits),
                                        static_cast<const int64_t*>(device_pointer(labels)),
                                        kRows,
                                        columns_,
                                        stride_,
                                        kFirst,
                                        kIgnored};
    found_ = machine_.memory().allocate(3 * kRows * acc_bytes(), "found");
    machine_.launch(stream, machine_.kernel("scan_kernel" + mangled(dtype_)), {3, 1, 1},
                    {256, 1, 1}, rows, found_);
    std::vector<std::byte> dy(kRows * acc_bytes());
    for (size_t r = 0; r < kRows; ++r) put_value(dy, r, acc_type(), kDy[r]);
    out_ = machine_.memory().allocate(logits_.size(), "out");
    const GradientParams params{rows, machine_.put(dy, "dy"), found_, out_, stride_};
    machine_.launch(stream, machine_.kernel("gradient_kernel" + mangled(dtype_)), {2, 1, 1},
                    {256, 1, 1}, params);
    machine_.run();
  }

  void check() {
    const auto statistics = machine_.get<std::byte>(found_, 3 * kRows * acc_bytes());
    for (size_t r = 0; r < kRows; ++r) {
      const auto got = [&](size_t which) {
        return value_at(statistics, which * kRows + r, acc_type());
      };
      std::vector<std::byte> want(static_cast<size_t>(columns_) * size());
      if (labels_[r] == kIgnored) {
        EXPECT_EQ(got(0), 0);
        EXPECT_EQ(got(1), 1);
        EXPECT_EQ(got(2), 0);
      } else {
        const auto* row = logits_.data() + row_bytes() * r;
        const auto scan = kernels::scan_logits(row, columns_, dtype_);
        EXPECT_EQ(got(0), scan.top);
        EXPECT_NEAR(got(1) / scan.sum, 1, bound());
        const int64_t label = labels_[r] < kFirst ? -1 : labels_[r] - kFirst;
        EXPECT_EQ(got(2), label < 0 ? 0 : kernels::logit_at(row, label, dtype_));
        kernels::cross_entropy_gradient(want.data(), row, columns_, dtype_, scan, kDy[r], label);
      }
      check_gradient(r, want);
    }
  }

 private:
  static constexpr int64_t kRows = 5, kIgnored = -100, kFirst = 1000;
  static constexpr double kDy[] = {0.5, 0.25, -1, 2, 0.125};

  void check_gradient(size_t r, const std::vector<std::byte>& want) {
    const auto got = machine_.get<std::byte>(out_ + row_bytes() * r, want.size());
    for (size_t c = 0; c < static_cast<size_t>(columns_); ++c) {
      const double a = value_at(got, c, dtype_), b = value_at(want, c, dtype_);
      // The label's element is a difference of two numbers up to |dy|; float16 has neighbours
      // 2^-24 apart below 2^-14.
      const double small = dtype_ == DataType::kFloat16 ? 0x1p-24 : 0x1p-125;
      const double most = bound() * std::abs(kDy[r]) + 2 * step_of(dtype_) * std::abs(b) + small;
      ASSERT_NEAR(a, b, most) << "row " << r << " column " << c;
    }
  }

  size_t size() const { return static_cast<size_t>(kernels::size_of(dtype_)); }
  size_t row_bytes() const { return static_cast<size_t>(stride_) * size(); }
  DataType acc_type() const {
    return dtype_ == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32;
  }
  size_t acc_bytes() const { return static_cast<size_t>(kernels::size_of(acc_type())); }
  // An exponential errs by up to 2 units, __expf by 2 + 1.16 |x| units, and |x| is below 40 here.
  // The rest is what sums in another order differ by.
  double bound() const {
    return (size() == 2 ? 64 : 24) * (dtype_ == DataType::kFloat64 ? 0x1p-52 : 0x1p-23);
  }

  DataType dtype_;
  int64_t columns_, stride_;  // rows begin anywhere
  Machine machine_;
  std::vector<std::byte> logits_;
  std::vector<int64_t> labels_;
  uint64_t found_ = 0, out_ = 0;
};

TEST_F(Kernels, CrossEntropyEqualsTheCpus) {
  const std::string text = ptx("cross_entropy");
  for (const auto dtype : kFloats) {
    for (const int64_t columns : {1, 37, 2100}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(columns));
      CrossEntropyRun run(text, dtype, columns, static_cast<uint64_t>(columns));
      run.run();
      run.check();
    }
  }
}

TEST_F(Kernels, CrossEntropyWithoutOneOfItsBarriersIsARace) {
  const std::string whole = ptx("cross_entropy");
  size_t at = whole.find("bar.sync", whole.find("scan_kernelIf"));
  for (int which = 0; which < 2; ++which, at = whole.find("bar.sync", at + 1)) {
    std::string text = whole;
    text.replace(at, text.find(';', at) - at, "bar.warp.sync 0xFFFFFFFF");
    int races = 0;
    for (uint64_t seed = 0; seed < 10; ++seed) {
      CrossEntropyRun run(text, DataType::kFloat32, 2100, seed);
      try {
        run.run();
      } catch (const MachineError&) {
        ++races;
      }
    }
    // Without the first one always; the second one counts where a CTA has two rows with labels.
    EXPECT_GE(races, which == 0 ? 10 : 1);
  }
}

// --- Goldfish
// --------------------------------------------------------------------------------------

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
