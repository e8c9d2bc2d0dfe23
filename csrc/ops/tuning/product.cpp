#include "ops/tuning/product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/tuning/product_check.h"
#include "ops/tuning/product_kernels.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {
namespace {

using tuning::ProductName;
using tuning::Variant;

constexpr auto kOp = "_tuned_mm";

// Below this many multiply-adds, a product on a CPU takes less than a millisecond (at some 40
// GFLOP/s per core), and any gain from a copy is lost in the noise.
constexpr int64_t kMinCpuProduct = int64_t{1} << 24;

// Copies a row-major matrix into column-major layout, and any other matrix into row-major layout.
at::Tensor relayout(const at::Tensor& t) {
  return t.stride(1) == 1 ? t.t().contiguous().t() : t.contiguous();
}

at::Tensor with_bias(at::Tensor product, const std::optional<at::Tensor>& bias) {
  if (bias) product.add_(*bias);
  return product;
}

at::Tensor direct(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  return bias && !a.is_cpu() ? at::addmm(*bias, a, b) : with_bias(at::mm(a, b), bias);
}

bool is_worth_asking(const at::Tensor& a, const at::Tensor& b) {
  const int64_t size = a.size(0) * a.size(1) * b.size(1);
  return a.is_cpu() ? size >= kMinCpuProduct : size > 0;
}

Signature signature_of(const char* name, const at::Tensor& a, const at::Tensor& b, bool has_bias) {
  auto signature =
      Signature(name).tensor("a", a).tensor("b", b).option("bias", has_bias).device(a.device());
  if (a.is_cuda() && a.scalar_type() == at::kFloat) {
    const auto precision =
        at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
    signature.option("tf32", precision == at::Float32Precision::TF32);
  }
  return signature;
}

// A product, as the tuner sees it.
class ProductAlternatives final : public Alternatives {
 public:
  ProductAlternatives(const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& bias)
      : a_(a), b_(b), bias_(bias) {}

  Candidates candidates() const override {
    Candidates all{{}, 0, ""};
    for (const auto variant : tuning::kLayoutVariants) all.names.emplace_back(name_of(variant));
    add_kernels(all, a_, b_, bias_);
    return all;
  }

  // Checks only the form of the name: which kernels take which operands may differ between ranks,
  // and mm() handles that.
  bool knows(const std::string& name) const override {
    return tuning::parse_product(name).has_value();
  }

  tuning::Numbers check(const std::vector<std::string>& names) const override {
    const auto multiply = [](const std::string& name, const at::Tensor& a, const at::Tensor& b,
                             const std::optional<at::Tensor>& bias) {
      return mm_by_name(tuning::parse_product(name).value(), a, b, bias);
    };
    return check_products(names, name_of(Variant::kDirect), a_, b_, bias_, multiply);
  }

  void run(const std::string& name) const override {
    mm_by_name(tuning::parse_product(name).value(), a_, b_, bias_);
  }

 private:
  const at::Tensor& a_;
  const at::Tensor& b_;
  const std::optional<at::Tensor>& bias_;
};

// Calls `use` with the product as a Tunable, a call that can be made in several ways.
template <typename Use>
auto with_tunable(const Group& group, const char* name, const at::Tensor& a, const at::Tensor& b,
                  const std::optional<at::Tensor>& bias, Use&& use) {
  const auto signature = signature_of(name, a, b, bias.has_value());
  const ProductAlternatives alternatives(a, b, bias);
  return use(Tunable{.group = group,
                     .signature = signature,
                     .device = a.device(),
                     .synchronizes = false,
                     .is_local = true,
                     .alternatives = alternatives});
}

}  // namespace

std::optional<at::Tensor> mm_by_name(const ProductName& name, const at::Tensor& a,
                                     const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  switch (name.variant) {
    case Variant::kDirect:
      return direct(a, b, bias);
    case Variant::kTransposed:
      return with_bias(at::mm(b.t(), a.t()).t().contiguous(), bias);
    case Variant::kRelayoutA:
      return direct(relayout(a), b, bias);
    case Variant::kRelayoutB:
      return direct(a, relayout(b), bias);
    default:
      return mm_by_kernel(name, a, b, bias);
  }
}

at::Tensor ProductChoice::mm(const at::Tensor& a, const at::Tensor& b,
                             const std::optional<at::Tensor>& bias) const {
  if (agree == nullptr || !is_worth_asking(a, b)) return direct(a, b, bias);
  const auto chosen =
      with_tunable(*agree, name, a, b, bias, [](const Tunable& call) { return resolve(call); });
  if (auto product = mm_by_name(tuning::parse_product(chosen).value(), a, b, bias)) return *product;
  // The choice was measured on other tensors of these sizes, perhaps on another rank. The tensors
  // at hand may begin at an address that the kernel cannot load from, or have gaps between rows
  // that the algorithm does not support.
  return direct(a, b, bias);
}

std::string tune_product(const at::Tensor& a, const at::Tensor& b,
                         const std::optional<at::Tensor>& bias, const std::string& name) {
  if (!is_worth_asking(a, b)) return "";
  return with_tunable(Group::alone(), name.c_str(), a, b, bias, [](const Tunable& call) {
    resolve(call);
    return full_signature(call);
  });
}

namespace {

void check_product(const char* op, const at::Tensor& a, const at::Tensor& b,
                   const std::optional<at::Tensor>& bias) {
  check_matmul(op, "a", a, "b", b);
  check_inner(op, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  TORCH_CHECK_VALUE(!bias || bias->sizes() == b.sizes().slice(1), op, ": bias must have shape [",
                    b.size(1), "], got ", bias ? bias->sizes() : at::IntArrayRef{});
  if (!bias) return;
  TORCH_CHECK_TYPE(bias->scalar_type() == a.scalar_type(), op, ": bias has dtype ",
                   bias->scalar_type(), ", expected ", a.scalar_type());
  TORCH_CHECK_VALUE(bias->device() == a.device(), op, ": bias is on ", bias->device(),
                    " but a is on ", a.device());
}

at::Tensor tuned_mm_op(const at::Tensor& a, const at::Tensor& b,
                       const std::optional<at::Tensor>& bias, const std::string& variant) {
  check_product(kOp, a, b, bias);
  const auto name = tuning::parse_product(variant);
  TORCH_CHECK_VALUE(name, kOp,
                    ": variant must be direct, transposed, relayout_a, relayout_b, fused_sm90, "
                    "cublaslt_<algorithm> or triton_<config>, got '",
                    variant, "'");
  auto product = mm_by_name(*name, a, b, bias);
  TORCH_CHECK_NOT_IMPLEMENTED(product, kOp, ": '", variant, "' is not built or not used here, or ",
                              "does not take ", a.sizes(), " @ ", b.sizes(), " of ",
                              a.scalar_type(), " on ", a.device(), " with strides ", a.strides(),
                              " and ", b.strides());
  return *product;
}

std::string tune_mm_op(const at::Tensor& a, const at::Tensor& b,
                       const std::optional<at::Tensor>& bias, const std::string& name) {
  check_product("_tune_mm", a, b, bias);
  return tune_product(a, b, bias, name);
}

void implement(torch::Library& m) {
  m.impl("_tuned_mm", &tuned_mm_op);
  m.impl("_tune_mm", &tune_mm_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(axonn, CUDA, m) { implement(m); }

}  // namespace axonn::ops
