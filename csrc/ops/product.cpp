#include "ops/product.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <array>

#include "ops/checks.h"
#include "ops/tuner.h"

namespace axonn::ops {
namespace {

constexpr auto kOp = "_tuned_mm";

// A product by a Triton kernel would be one more variant: a name, a predicate as takes_sm90(), and
// a private op of the schema that a module which need not be there implements.
constexpr std::array kVariants{Variant::kDirect, Variant::kTransposed, Variant::kRelayoutA,
                               Variant::kRelayoutB, Variant::kFusedSm90};

// Whether the kernel for sm_90 may be chosen. It compiles, and has not run on a GPU yet: until its
// results have been checked there, it runs where it is named and nowhere else.
constexpr bool kChoosesSm90 = false;

// Below this many multiply-adds a CPU's product takes less than about half a millisecond (at some
// 40 GFLOP/s of a core): what a copy could win is lost in the noise.
constexpr int64_t kMinCpuProduct = int64_t{1} << 24;

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// The module that implements it need not be built, nor need the device be of its architecture.
bool takes_sm90(const at::Tensor& a, const at::Tensor& b) {
  static const auto op = find("axonn::_gemm_sm90_takes");
  if (a.is_cpu() || !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return false;
  static const auto typed = op.typed<bool(const at::Tensor&, const at::Tensor&)>();
  return typed.call(a, b);
}

at::Tensor gemm_sm90(const at::Tensor& a, const at::Tensor& b,
                     const std::optional<at::Tensor>& bias) {
  static const auto op = find("axonn::_gemm_sm90");
  using Schema = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&);
  static const auto typed = op.typed<Schema>();
  return typed.call(a, b, bias);
}

// Rows become columns, all else becomes rows.
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
  return Signature(name).tensor("a", a).tensor("b", b).option("bias", has_bias).device(a.device());
}

// Calls `use` with the product as the tuner sees it.
template <typename Use>
auto with_tunable(const Group& group, const char* name, const at::Tensor& a, const at::Tensor& b,
                  const std::optional<at::Tensor>& bias, Use&& use) {
  const auto signature = signature_of(name, a, b, bias.has_value());
  std::vector<Variant> variants;
  const auto candidates = [&] {
    variants = variants_for(a, b);
    Candidates all{{}, 0};
    for (const auto variant : variants) all.names.push_back(name_of(variant));
    return all;
  };
  const auto run = [&](size_t i) { tuned_mm(a, b, bias, variants[i]); };
  return use(Tunable{.group = group,
                     .signature = signature,
                     .device = a.device(),
                     .meets = false,
                     .is_local = true,
                     .candidates = candidates,
                     .run = run});
}

}  // namespace

const char* name_of(Variant variant) {
  switch (variant) {
    case Variant::kDirect:
      return "direct";
    case Variant::kTransposed:
      return "transposed";
    case Variant::kRelayoutA:
      return "relayout_a";
    case Variant::kRelayoutB:
      return "relayout_b";
    case Variant::kFusedSm90:
      return "fused_sm90";
  }
  return "";
}

Variant variant_named(const std::string& name) {
  for (const auto variant : kVariants) {
    if (name == name_of(variant)) return variant;
  }
  TORCH_CHECK_VALUE(false, kOp,
                    ": variant must be one of direct, transposed, relayout_a, relayout_b, "
                    "fused_sm90, got '",
                    name, "'");
}

std::vector<Variant> variants_for(const at::Tensor& a, const at::Tensor& b) {
  std::vector<Variant> variants(kVariants.begin(), kVariants.end());
  if (!kChoosesSm90 || !takes_sm90(a, b)) variants.pop_back();
  return variants;
}

at::Tensor tuned_mm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                    Variant variant) {
  switch (variant) {
    case Variant::kDirect:
      return direct(a, b, bias);
    case Variant::kTransposed:
      return with_bias(at::mm(b.t(), a.t()).t().contiguous(), bias);
    case Variant::kRelayoutA:
      return direct(relayout(a), b, bias);
    case Variant::kRelayoutB:
      return direct(a, relayout(b), bias);
    case Variant::kFusedSm90:
      return gemm_sm90(a, b, bias);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor ProductChoice::mm(const at::Tensor& a, const at::Tensor& b,
                             const std::optional<at::Tensor>& bias) const {
  if (agree == nullptr || !is_worth_asking(a, b)) return direct(a, b, bias);
  const auto variant = variant_named(
      with_tunable(*agree, name, a, b, bias, [](const Tunable& call) { return resolve(call); }));
  // Measured on other tensors of these sizes: these may begin at an address the kernel cannot load.
  if (variant == Variant::kFusedSm90 && !takes_sm90(a, b)) return direct(a, b, bias);
  return tuned_mm(a, b, bias, variant);
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
}

at::Tensor tuned_mm_op(const at::Tensor& a, const at::Tensor& b,
                       const std::optional<at::Tensor>& bias, const std::string& variant) {
  check_product(kOp, a, b, bias);
  const auto chosen = variant_named(variant);
  TORCH_CHECK_NOT_IMPLEMENTED(chosen != Variant::kFusedSm90 || takes_sm90(a, b), kOp,
                              ": variant 'fused_sm90' needs bfloat16 or float16 on a GPU of sm_90, "
                              "operands without gaps whose "
                              "rows are multiples of 16 bytes, and axonn_ext built for it; got ",
                              a.sizes(), " @ ", b.sizes(), " of ", a.scalar_type(), " on ",
                              a.device());
  return tuned_mm(a, b, bias, chosen);
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
