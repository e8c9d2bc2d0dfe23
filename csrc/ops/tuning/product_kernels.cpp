#include "ops/tuning/product_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace axonn::ops {
namespace {

using tuning::ProductName;
using tuning::Variant;

// Holds one bit per variant.
struct Kinds {
  std::atomic<uint32_t> used{0}, unverified{0};
};

Kinds& kinds() {
  static Kinds all;
  return all;
}

uint32_t bit_of(Variant variant) { return uint32_t{1} << static_cast<int>(variant); }

uint32_t bits_of(const std::vector<std::string>& names) {
  uint32_t bits = 0;
  for (const auto& name : names) {
    const auto* const found =
        std::find_if(tuning::kKernelVariants.begin(), tuning::kKernelVariants.end(),
                     [&](Variant variant) { return name == name_of(variant); });
    TORCH_CHECK_VALUE(found != tuning::kKernelVariants.end(),
                      "product_kernels: expected cublaslt, triton or fused_sm90, got '", name, "'");
    bits |= bit_of(*found);
  }
  return bits;
}

struct Kernel {
  explicit Kernel(Variant kind)
      : variant(kind),
        candidates(find(std::string(name_of(kind)) + "_candidates")),
        product(find(name_of(kind))) {}

  static c10::OperatorHandle find(const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(("axonn::_mm_" + name).c_str(), "");
  }

  bool is_there_for(const at::Tensor& a) const {
    const auto key = a.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    return product.hasKernelForDispatchKey(key);
  }
  bool is_used_for(const at::Tensor& a) const {
    return (kinds().used & bit_of(variant)) != 0 && is_there_for(a);
  }
  bool is_locked_for(const at::Tensor& a) const {
    return (kinds().unverified & bit_of(variant)) != 0 && is_there_for(a);
  }

  Variant variant;
  c10::OperatorHandle candidates;
  c10::OperatorHandle product;
};

// Returns the error's text without its backtrace.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Returns the kinds of kernels in the order in which they are offered.
const auto& kernels() {
  static const std::array all{Kernel(tuning::kKernelVariants[0]),
                              Kernel(tuning::kKernelVariants[1]),
                              Kernel(tuning::kKernelVariants[2])};
  static_assert(all.size() == tuning::kKernelVariants.size());
  return all;
}

}  // namespace

void configure_product_kernels(const std::vector<std::string>& used,
                               const std::vector<std::string>& unverified) {
  const uint32_t used_bits = bits_of(used), unverified_bits = bits_of(unverified);
  kinds().used = used_bits;
  kinds().unverified = unverified_bits;
}

void add_kernels(Candidates& candidates, const at::Tensor& a, const at::Tensor& b,
                 const std::optional<at::Tensor>& bias) {
  for (const auto& kernel : kernels()) {
    const bool locked = kernel.is_locked_for(a);
    if (!locked && !kernel.is_used_for(a)) continue;
    std::vector<std::string> found;
    try {
      found = kernel.candidates.typed<KernelCandidates>().call(a, b, bias);
    } catch (const std::exception& error) {
      TORCH_WARN("axonn_ext measures no ", name_of(kernel.variant), " kernels for ", a.sizes(),
                 " @ ", b.sizes(), " of ", a.scalar_type(), ": ", first_line(error.what()));
      continue;
    }
    if (found.empty()) continue;
    if (locked) {
      suggest_verify();
      continue;
    }
    auto& libraries = candidates.libraries;
    libraries.append(libraries.empty() ? "" : " ").append(name_of(kernel.variant));
    libraries.append("=").append(found.front());
    for (size_t i = 1; i < found.size(); ++i) {
      candidates.names.push_back(to_text(ProductName{kernel.variant, found[i]}));
    }
  }
}

std::optional<at::Tensor> mm_by_kernel(const ProductName& name, const at::Tensor& a,
                                       const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  for (const auto& kernel : kernels()) {
    if (kernel.variant != name.variant || !kernel.is_used_for(a)) continue;
    auto product = kernel.product.typed<KernelProduct>().call(a, b, bias, name.detail);
    if (!product.empty()) return std::move(product.front());
  }
  return std::nullopt;
}

}  // namespace axonn::ops
