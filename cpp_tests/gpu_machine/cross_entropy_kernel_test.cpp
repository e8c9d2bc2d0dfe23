// The cross-entropy kernels, as compiled by nvcc, against csrc/core/numeric/cross_entropy.h.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/cuda/cross_entropy.h"
#include "core/numeric/cross_entropy.h"
#include "gpu_machine/kernel_ptx.h"
#include "gpu_machine/kernel_values.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

using kernels::DataType;
using testing::device_pointer;
using testing::draw;
using testing::kFloats;
using testing::mangled;
using testing::put_value;
using testing::step_of;
using testing::value_at;

using CrossEntropyKernels = testing::KernelTest;
// ---------------------------------------------------------------------------------

struct GradientParams {  // as in cross_entropy.cu
  kernels::cuda::LogitRows rows;
  uint64_t dy, statistics, out;
  int64_t out_row_stride;
};

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
    labels_[2] = kFirst - 1;  // a label of another rank
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
      // The label's element is a difference of two numbers up to |dy|; below 2^-14, neighboring
      // float16 numbers are 2^-24 apart.
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
  // The error of exp is up to 2 units, that of __expf is 2 + 1.16 |x| units, and |x| is below 40
  // here. The rest is the difference between sums in another order.
  double bound() const {
    return (size() == 2 ? 64 : 24) * (dtype_ == DataType::kFloat64 ? 0x1p-52 : 0x1p-23);
  }

  DataType dtype_;
  int64_t columns_, stride_;  // rows are not aligned
  Machine machine_;
  std::vector<std::byte> logits_;
  std::vector<int64_t> labels_;
  uint64_t found_ = 0, out_ = 0;
};

TEST_F(CrossEntropyKernels, CrossEntropyEqualsTheCpus) {
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

TEST_F(CrossEntropyKernels, CrossEntropyWithoutOneOfItsBarriersIsARace) {
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
    // Removing the first always races; the second matters if a CTA has two rows with labels.
    EXPECT_GE(races, which == 0 ? 10 : 1);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
