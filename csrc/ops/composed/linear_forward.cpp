// Computes y = x @ weight.t(), plus the bias, for a Linear of the 3D matmul.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/checks.h"
#include "ops/composed/linear_pass.h"
#include "ops/composed/linear_products.h"
#include "ops/composed/register.h"
#include "ops/fused_cpu.h"

namespace axonn::ops {
namespace {

using namespace linear;

constexpr auto kOp = "linear_forward";

// Adds the bias after the sum over s, so that it is added only once. A rank of s may hold only a
// part of the features.
void add_bias(const LinearAxes& axes, at::Tensor y, const std::optional<at::Tensor>& bias) {
  if (!bias) return;
  const int64_t own = y.size(1);
  y.add_(own == bias->size(0) ? *bias : bias->narrow(0, axes.s.rank * own, own));
}

LinearOutput composed_forward(LinearAxes& axes, const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, bool save_input,
                              bool save_weight, AskedAlgorithm how) {
  const auto products = products_of(axes, "mm_forward");
  // Gathers come first, then one whole product.
  const bool apart = how == Algorithm::kSequential;
  // The weight is gathered on its own if it must be kept, or if another tensor is gathered or
  // summed as well. Otherwise its rows feed the matmul.
  if (!apart && axes.z.size > 1 && !save_weight && !axes.gathers() && axes.s.size == 1) {
    const auto y = feed_rhs(x, weight.t(), 1, axes.z, how);
    add_bias(axes, y, bias);
    return {y, nothing(x), nothing(weight)};
  }
  const auto full_weight = gather(weight, axes.z, 0, how);
  // The input is gathered on its own if it must be kept, or if the product is also summed over s.
  // Otherwise its rows feed the matmul.
  const bool feed = !apart && axes.gathers() && !save_input && axes.s.size == 1;
  const auto full_x = axes.gathers() && !feed ? gather(x, axes.r, axes.gather_dim, how) : x;
  at::Tensor y;
  if (bias && !feed && axes.s.size == 1 && !axes.device.is_cpu()) {
    y = products.mm(full_x, full_weight.t(), bias);  // a GPU's matmul adds it in the epilogue
  } else {
    y = feed ? feed_lhs(x, full_weight.t(), axes.gather_dim, axes.r, how)
             : multiply(products, full_x, full_weight.t(), axes.s, axes.sharded, axes.scatter_dim,
                        how, axes.deterministic);
    add_bias(axes, y, bias);
  }
  return {y, axes.gathers() && save_input ? full_x : nothing(x),
          axes.z.size > 1 && save_weight ? full_weight : nothing(weight)};
}

// Returns the sizes of the whole tensors. Raises for operands that do not fit.
PassSizes check_operands(const LinearAxes& axes, const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias) {
  check_matmul(kOp, "x", x, "weight", weight);
  const int64_t features = x.size(1) * (axes.gathers() && axes.gather_dim == 1 ? axes.r.size : 1);
  check_inner(kOp, "features of x", features, "weight.size(1)", weight.size(1));
  const int64_t rows = x.size(0) * (axes.gathers() && axes.gather_dim == 0 ? axes.r.size : 1);
  const int64_t out_features = weight.size(0) * axes.z.size;
  if (bias) {
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == out_features, kOp,
                      ": bias must have shape [", out_features, "], got ", bias->sizes());
    TORCH_CHECK_TYPE(bias->scalar_type() == x.scalar_type(), kOp, ": bias has dtype ",
                     bias->scalar_type(), " but x has ", x.scalar_type());
  }
  if (axes.sharded) {
    check_scatter(kOp, "the output", {rows, out_features}, axes.scatter_dim, axes.s.size);
  }
  return {x.scalar_type(), rows, features, out_features};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, bool save_input, bool save_weight,
    const std::string& algorithm, bool deterministic) {
  auto axes = resolve_axes(kOp, group_names, group_sizes, sharded, gather_dim, scatter_dim,
                           algorithm, deterministic, x.device());
  const auto sizes = check_operands(axes, x, weight, bias);
  auto signature = signature_of(kOp, axes);
  signature.tensor("x", x)
      .tensor("weight", weight)
      .option("save_input", save_input)
      .option("save_weight", save_weight)
      .device(axes.device)
      .gradients({{"x", x}, {"weight", weight}});
  if (bias) signature.gradients({{"bias", *bias}});
  auto nobody = Group::alone();
  const auto [y, full_x, full_weight] = run(
      axes, {&axes.z, axes.gathers() ? &axes.r : &nobody, &axes.s}, sizes,
      x.numel() == 0 || weight.numel() == 0, signature,
      [&](const comm::CallSignature& call) {
        auto output = cpu::linear_forward(axes, call, x, weight, save_input, save_weight);
        add_bias(axes, output.y, bias);
        return output;
      },
      [&](AskedAlgorithm how) {
        return composed_forward(axes, x, weight, bias, save_input, save_weight, how);
      });
  return {y, full_x, full_weight};
}

}  // namespace

AXONN_REGISTER_OP(linear_forward)
AXONN_REGISTER_AUTOCAST(linear_forward, casts_operands)

}  // namespace axonn::ops
