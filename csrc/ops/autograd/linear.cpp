// Gradients of a Linear of the 3D matmul; see calls.h.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/autograd/calls.h"
#include "ops/checks.h"
#include "ops/needs_grad.h"

namespace axonn::ops::autograd {
namespace {

using Triple = std::tuple<Tensor, Tensor, Tensor>;

struct LinearArguments {
  std::vector<std::string> group_names;
  std::vector<int64_t> group_sizes;
  bool sharded;
  int64_t gather_dim;
  int64_t scatter_dim;
  std::string algorithm;
  bool deterministic;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["group_names"] = group_names;
    ctx->saved_data["group_sizes"] = group_sizes;
    ctx->saved_data["layout"] = std::make_tuple(sharded, gather_dim, scatter_dim, deterministic);
    ctx->saved_data["algorithm"] = algorithm;
  }
  static LinearArguments load(AutogradContext* ctx) {
    const auto [sharded, gather_dim, scatter_dim, deterministic] =
        ctx->saved_data["layout"].to<std::tuple<bool, int64_t, int64_t, bool>>();
    return {ctx->saved_data["group_names"].to<std::vector<std::string>>(),
            ctx->saved_data["group_sizes"].toIntVector(),
            sharded,
            gather_dim,
            scatter_dim,
            ctx->saved_data["algorithm"].toStringRef(),
            deterministic};
  }
};

Triple call_forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const LinearArguments& a, bool save_input, bool save_weight) {
  static const auto op =
      find<Triple(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                  const std::vector<std::string>&, at::IntArrayRef, bool, int64_t, int64_t, bool,
                  bool, const std::string&, bool)>("axonn::linear_forward");
  return op.call(x, weight, bias, a.group_names, a.group_sizes, a.sharded, a.gather_dim,
                 a.scatter_dim, save_input, save_weight, a.algorithm, a.deterministic);
}

Triple call_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, bool x_is_full,
                     bool weight_is_full, std::array<bool, 3> mask, const LinearArguments& a) {
  static const auto op =
      find<Triple(const Tensor&, const Tensor&, const Tensor&, bool, bool, std::array<bool, 3>,
                  const std::vector<std::string>&, at::IntArrayRef, bool, int64_t, int64_t,
                  const std::string&, bool)>("axonn::linear_backward");
  return op.call(dy, x, weight, x_is_full, weight_is_full, mask, a.group_names, a.group_sizes,
                 a.sharded, a.gather_dim, a.scatter_dim, a.algorithm, a.deterministic);
}

struct LinearNode : Function<LinearNode> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const std::optional<Tensor>& bias, const LinearArguments& arguments,
                               bool save_input, bool save_weight) {
    const BelowAutograd below;
    auto [y, full_x, full_weight] =
        call_forward(x, weight, bias, arguments, save_input, save_weight);
    ctx->mark_non_differentiable({full_x, full_weight});
    ctx->set_materialize_grads(false);
    // A tensor that was not gathered is already whole.
    const bool x_gathered = arguments.sharded && arguments.group_sizes[0] > 1;
    const bool weight_gathered = arguments.group_sizes[2] > 1;
    ctx->saved_data["x_is_full"] = !x_gathered || save_input;
    ctx->saved_data["weight_is_full"] = !weight_gathered || save_weight;
    ctx->saved_data["has_bias"] = bias.has_value();
    // x is needed only for dweight.
    const Tensor kept_x = x_gathered && save_input ? full_x : x;
    ctx->save_for_backward({weight.requires_grad() ? kept_x : Tensor(),
                            weight_gathered && save_weight ? full_weight : weight});
    arguments.save(ctx);
    return {y, full_x, full_weight};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(6);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const std::array<bool, 3> mask{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                   has_bias && ctx->needs_input_grad(2)};
    // A gathered copy has no autograd history, but its shard has one. The copy is marked as
    // requiring a gradient, so that a second differentiation is refused here, too.
    const auto tracked = [](const Tensor& t) {
      return at::GradMode::is_enabled() && !t.requires_grad() ? t.detach().requires_grad_() : t;
    };
    const auto x = saved[0].defined() ? saved[0] : at::empty({0, 0}, grads[0].options());
    const auto [dx, dweight, dbias] = call_backward(
        grads[0], tracked(x), tracked(saved[1]), ctx->saved_data["x_is_full"].toBool(),
        ctx->saved_data["weight_is_full"].toBool(), mask, LinearArguments::load(ctx));
    if (mask[0]) result[0] = dx;
    if (mask[1]) result[1] = dweight;
    if (mask[2]) result[2] = dbias;
    return result;
  }
};

Triple linear_forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::vector<std::string>& group_names, at::IntArrayRef group_sizes,
                      bool sharded, int64_t gather_dim, int64_t scatter_dim, bool save_input,
                      bool save_weight, const std::string& algorithm, bool deterministic) {
  const LinearArguments arguments{group_names, group_sizes.vec(), sharded,      gather_dim,
                                  scatter_dim, algorithm,         deterministic};
  constexpr auto kOp = "linear_forward";
  check_dense(kOp, "x", x);
  check_dense(kOp, "weight", weight);
  check_device(kOp, "x", x, "weight", weight);
  if (bias) {
    check_dense(kOp, "bias", *bias);
    check_device(kOp, "x", x, "bias", *bias);
  }
  if (needs_grad(kOp, {&x, &weight, bias ? &*bias : &x})) {
    const auto out = LinearNode::apply(x, weight, bias, arguments, save_input, save_weight);
    return {out[0], out[1], out[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_forward(x, weight, bias, arguments, save_input, save_weight);
}

struct LinearBackwardNode : Function<LinearBackwardNode> {
  static variable_list forward(AutogradContext*, const Tensor& dy, const Tensor& x,
                               const Tensor& weight, bool x_is_full, bool weight_is_full,
                               std::array<bool, 3> mask, const LinearArguments& arguments) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, dweight, dbias] =
        call_backward(dy, x, weight, x_is_full, weight_is_full, mask, arguments);
    return {dx, dweight, dbias};
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "linear_backward: a Linear of the 3D matmul can be differentiated "
                                "once only; leave create_graph=False");
  }
};

Triple linear_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, bool x_is_full,
                       bool weight_is_full, std::array<bool, 3> mask,
                       const std::vector<std::string>& group_names, at::IntArrayRef group_sizes,
                       bool sharded, int64_t gather_dim, int64_t scatter_dim,
                       const std::string& algorithm, bool deterministic) {
  const LinearArguments arguments{group_names, group_sizes.vec(), sharded,      gather_dim,
                                  scatter_dim, algorithm,         deterministic};
  constexpr auto kOp = "linear_backward";
  check_dense(kOp, "dy", dy);
  check_device(kOp, "dy", dy, "x", x);
  check_device(kOp, "dy", dy, "weight", weight);
  if (needs_grad(kOp, {&dy, &x, &weight})) {
    const auto out =
        LinearBackwardNode::apply(dy, x, weight, x_is_full, weight_is_full, mask, arguments);
    return {out[0], out[1], out[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(dy, x, weight, x_is_full, weight_is_full, mask, arguments);
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, Autograd, m) {
  m.impl("linear_forward", &linear_forward);
  m.impl("linear_backward", &linear_backward);
}

}  // namespace axonn::ops::autograd
