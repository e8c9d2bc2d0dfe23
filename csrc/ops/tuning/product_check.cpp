#include "ops/tuning/product_check.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sub.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/gemm/product_variant.h"

namespace axonn::ops {
namespace {

constexpr uint64_t kSeed = 5489;
// Kernels depend on addresses only modulo this number.
constexpr int64_t kAlignment = 256;

struct Operands {
  at::Tensor a, b;
  std::optional<at::Tensor> bias;
};

// The result has equal strides and is as far from an aligned address, so a kernel that takes one
// tensor takes the other.
at::Tensor random_like(const at::Tensor& t, at::Generator& generator) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  const int64_t offset = static_cast<int64_t>(address % kAlignment) / t.element_size();
  int64_t span = 1;
  for (int64_t dim = 0; dim < t.dim(); ++dim) span += (t.size(dim) - 1) * t.stride(dim);
  const auto storage = at::empty({offset + span}, t.options());
  storage.normal_(0, 1, generator);
  return storage.as_strided(t.sizes(), t.strides(), offset);
}

Operands random_operands(const at::Tensor& a, const at::Tensor& b,
                         const std::optional<at::Tensor>& bias) {
  auto generator = at::globalContext().defaultGenerator(a.device()).clone();
  generator.set_current_seed(kSeed);
  Operands operands{random_like(a, generator), random_like(b, generator), std::nullopt};
  // The bias is as large as the sums; if it were smaller, a missing bias would pass for rounding.
  const auto size = std::sqrt(static_cast<double>(a.size(1)));
  if (bias) operands.bias = random_like(*bias, generator).mul_(size);
  return operands;
}

double float32_epsilon(c10::Device device) {
  const auto backend = device.is_cpu() ? at::Float32Backend::MKLDNN : at::Float32Backend::CUDA;
  switch (at::globalContext().float32Precision(backend, at::Float32Op::MATMUL)) {
    case at::Float32Precision::TF32:
      return 0x1p-10;
    case at::Float32Precision::BF16:
      return 0x1p-7;
    default:
      return 0x1p-23;
  }
}

double epsilon_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return 0x1p-7;
    case at::kHalf:
      return 0x1p-10;
    case at::kDouble:
      return 0x1p-52;
    default:
      return float32_epsilon(t.device());
  }
}

// A kernel that leaves parts of its output unwritten must not find the right values there, left by
// a product computed before. So results do not outlive their check, and free memory that is likely
// to become the next output is overwritten with this value.
constexpr double kSpoilt = std::numeric_limits<double>::quiet_NaN();

void spoil_free_memory(const at::Tensor& like) { at::full_like(like, kSpoilt); }

// Returns the error's text without its backtrace.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

bool is_kernel(const std::string& name) {
  const auto parsed = tuning::parse_product(name);
  const auto& kernels = tuning::kKernelVariants;
  return parsed && std::find(kernels.begin(), kernels.end(), parsed->variant) != kernels.end();
}

// Returns why the result is wrong, or an empty text if it is correct.
std::string fault_of(const at::Tensor& result, const at::Tensor& reference, double tolerance) {
  if (result.sizes() != reference.sizes()) return "its result has another shape";
  const auto difference = at::max(at::sub(result, reference).abs_()).item<double>();
  // NaN fails every comparison, so in this form it counts as a fault.
  if (difference <= tolerance) return "";
  return "its result differs by " + std::to_string(difference) + ", at most " +
         std::to_string(tolerance) + " is rounding";
}

}  // namespace

tuning::Numbers check_products(const std::vector<std::string>& names, const std::string& reference,
                               const at::Tensor& a, const at::Tensor& b,
                               const std::optional<at::Tensor>& bias, Multiply multiply) {
  tuning::Numbers wrong(names.size());
  for (size_t i = 0; i < names.size(); ++i) wrong[i] = names[i] == reference ? 0 : 1;
  if (names.size() == 1) return wrong;
  Operands operands;
  const auto by = [&](const std::string& name) {
    return multiply(name, operands.a, operands.b, operands.bias);
  };
  std::optional<at::Tensor> expected;
  try {
    operands = random_operands(a, b, bias);
    expected = by(reference);
  } catch (const c10::OutOfMemoryError& error) {
    TORCH_WARN("axonn_ext does not look for a faster ", a.sizes(), " @ ", b.sizes(), " of ",
               a.scalar_type(), ": no memory to check results: ", error.what_without_backtrace());
    return wrong;
  }
  const bool is_double = a.scalar_type() == at::kDouble;
  const double tolerance = tuning::tolerated_difference(epsilon_of(a), a.size(1), is_double);
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == reference) continue;
    std::string fault;
    try {
      spoil_free_memory(*expected);
      const auto result = by(names[i]);
      if (!result) continue;
      fault = fault_of(*result, *expected, tolerance);
      // Only kernels must repeat their bits. Those of the library's own products on a CPU may
      // depend on addresses.
      if (fault.empty() && is_kernel(names[i])) {
        spoil_free_memory(*expected);
        const auto again = by(names[i]);
        if (!again || !at::equal(*result, *again)) fault = "its result is not the same bits twice";
        if (again) again->fill_(kSpoilt);
      }
      result->fill_(kSpoilt);
      wrong[i] = fault.empty() ? 0 : 1;
    } catch (const std::exception& error) {
      fault = first_line(error.what());
    }
    if (!fault.empty()) {
      TORCH_WARN("axonn_ext does not use '", names[i], "' for ", a.sizes(), " @ ", b.sizes(),
                 " of ", a.scalar_type(), ": ", fault);
    }
  }
  return wrong;
}

}  // namespace axonn::ops
