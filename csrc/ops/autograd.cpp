// Gradients of the ops. Each is made of the same ops, so backward overlaps what forward does.
//
// A tensor that an op leaves whole on every rank (all_reduce, matmul_all_reduce) has, by
// convention, a gradient of one of two kinds, and each op fixes which: matmul_all_reduce hands its
// result to ranks that all do the same with it, so its gradient is whole on every rank and nothing
// is summed; all_reduce hands its result to ranks that each do something of their own, so their
// gradients are summed.
//
// In C++, because a node in Python costs 30 us more, which is what a small matmul takes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "ops/checks.h"
#include "ops/needs_grad.h"

namespace axonn::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// In the forward pass of a node: below autograd, but in the mode of its caller, which a node turns
// off. Ranks compare which gradients they will need (Signature::gradients).
struct BelowAutograd {
  at::AutoGradMode mode{true};
  at::AutoDispatchBelowADInplaceOrView below;
};

// --- Calls ---------------------------------------------------------------------------------------

// The last three arguments of most schemas.
struct GroupArguments {
  std::string name;
  int64_t size;
  std::string algorithm;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["group"] = std::make_tuple(name, size, algorithm);
  }
  static GroupArguments load(AutogradContext* ctx) {
    auto [name, size, algorithm] =
        ctx->saved_data["group"].to<std::tuple<std::string, int64_t, std::string>>();
    return {std::move(name), size, std::move(algorithm)};
  }
};

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using CollectiveSignature = Tensor(const Tensor&, int64_t, const std::string&, int64_t,
                                   const std::string&);
using AllReduceSignature = Tensor(const Tensor&, const std::string&, const std::string&, int64_t,
                                  const std::string&);
using MatmulSignature = Tensor(const Tensor&, const Tensor&, int64_t, const std::string&, int64_t,
                               const std::string&);
using MatmulAllReduceSignature = Tensor(const Tensor&, const Tensor&, const std::string&, int64_t,
                                        const std::string&);

Tensor all_gather(const Tensor& t, int64_t dim, const GroupArguments& g) {
  static const auto op = find<CollectiveSignature>("axonn::all_gather");
  return op.call(t, dim, g.name, g.size, g.algorithm);
}
Tensor reduce_scatter(const Tensor& t, int64_t dim, const GroupArguments& g) {
  static const auto op = find<CollectiveSignature>("axonn::reduce_scatter");
  return op.call(t, dim, g.name, g.size, g.algorithm);
}
Tensor all_reduce(const Tensor& t, const std::string& reduce_op, const GroupArguments& g) {
  static const auto op = find<AllReduceSignature>("axonn::all_reduce");
  return op.call(t, reduce_op, g.name, g.size, g.algorithm);
}
Tensor all_gather_matmul(const Tensor& a, const Tensor& b, int64_t dim, const GroupArguments& g) {
  static const auto op = find<MatmulSignature>("axonn::all_gather_matmul");
  return op.call(a, b, dim, g.name, g.size, g.algorithm);
}
Tensor matmul_all_gather_rhs(const Tensor& a, const Tensor& b, int64_t dim,
                             const GroupArguments& g) {
  static const auto op = find<MatmulSignature>("axonn::matmul_all_gather_rhs");
  return op.call(a, b, dim, g.name, g.size, g.algorithm);
}
Tensor matmul_reduce_scatter(const Tensor& a, const Tensor& b, int64_t dim,
                             const GroupArguments& g) {
  static const auto op = find<MatmulSignature>("axonn::matmul_reduce_scatter");
  return op.call(a, b, dim, g.name, g.size, g.algorithm);
}
Tensor matmul_all_reduce(const Tensor& a, const Tensor& b, int64_t, const GroupArguments& g) {
  static const auto op = find<MatmulAllReduceSignature>("axonn::matmul_all_reduce");
  return op.call(a, b, g.name, g.size, g.algorithm);
}

// --- Collectives ---------------------------------------------------------------------------------

using Collective = Tensor (*)(const Tensor&, int64_t, const GroupArguments&);

struct AllGather {
  static constexpr const char *kOp = "all_gather", *kInput = "shard";
  static constexpr Collective op = all_gather, gradient = reduce_scatter;
};

struct ReduceScatter {
  static constexpr const char *kOp = "reduce_scatter", *kInput = "input";
  static constexpr Collective op = reduce_scatter, gradient = all_gather;
};

template <typename Rule>
struct CollectiveNode : Function<CollectiveNode<Rule>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& t, int64_t dim,
                        const GroupArguments& group) {
    ctx->saved_data["dim"] = dim;
    group.save(ctx);
    const BelowAutograd below;
    return Rule::op(t, dim, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto group = GroupArguments::load(ctx);
    return {Rule::gradient(grads[0], ctx->saved_data["dim"].toInt(), group), {}, {}};
  }
};

template <typename Rule>
Tensor collective(const Tensor& t, int64_t dim, const std::string& name, int64_t size,
                  const std::string& algorithm) {
  const GroupArguments group{name, size, algorithm};
  check_dense(Rule::kOp, Rule::kInput, t);
  if (needs_grad(Rule::kOp, {&t})) return CollectiveNode<Rule>::apply(t, dim, group);
  const at::AutoDispatchBelowADInplaceOrView below;
  return Rule::op(t, dim, group);
}

struct AllReduceNode : Function<AllReduceNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& t, const std::string& reduce_op,
                        const GroupArguments& group) {
    ctx->saved_data["reduce_op"] = reduce_op;
    group.save(ctx);
    const BelowAutograd below;
    return all_reduce(t, reduce_op, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto reduce_op = ctx->saved_data["reduce_op"].toStringRef();
    TORCH_CHECK_NOT_IMPLEMENTED(reduce_op == "sum", "all_reduce: reduce_op='", reduce_op,
                                "' has no gradient");
    return {all_reduce(grads[0], "sum", GroupArguments::load(ctx)), {}, {}};
  }
};

Tensor differentiable_all_reduce(const Tensor& t, const std::string& reduce_op,
                                 const std::string& name, int64_t size,
                                 const std::string& algorithm) {
  const GroupArguments group{name, size, algorithm};
  check_dense("all_reduce", "input", t);
  if (needs_grad("all_reduce", {&t})) return AllReduceNode::apply(t, reduce_op, group);
  const at::AutoDispatchBelowADInplaceOrView below;
  return all_reduce(t, reduce_op, group);
}

// --- Matmuls -------------------------------------------------------------------------------------

using Matmul = Tensor (*)(const Tensor&, const Tensor&, int64_t, const GroupArguments&);

// The gradients of y = op(a, b), given dy.
struct AllGatherMatmul {
  static constexpr const char *kOp = "all_gather_matmul", *kA = "a_shard", *kB = "b";
  static constexpr Matmul op = all_gather_matmul;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t dim, const GroupArguments& g) {
    return matmul_reduce_scatter(dy, b.t(), dim, g);
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t dim, const GroupArguments& g) {
    return all_gather_matmul(a.t(), dy, 1 - dim, g);
  }
};

struct MatmulAllGatherRhs {
  static constexpr const char *kOp = "matmul_all_gather_rhs", *kA = "a", *kB = "b_shard";
  static constexpr Matmul op = matmul_all_gather_rhs;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t dim, const GroupArguments& g) {
    return matmul_all_gather_rhs(dy, b.t(), 1 - dim, g);
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t dim, const GroupArguments& g) {
    return matmul_reduce_scatter(a.t(), dy, dim, g);
  }
};

struct MatmulReduceScatter {
  static constexpr const char *kOp = "matmul_reduce_scatter", *kA = "a", *kB = "b";
  static constexpr Matmul op = matmul_reduce_scatter;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t dim, const GroupArguments& g) {
    return all_gather_matmul(dy, b.t(), dim, g);
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t dim, const GroupArguments& g) {
    return matmul_all_gather_rhs(a.t(), dy, dim, g);
  }
};

struct MatmulAllReduce {
  static constexpr const char *kOp = "matmul_all_reduce", *kA = "a", *kB = "b";
  static constexpr Matmul op = matmul_all_reduce;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t, const GroupArguments&) {
    return at::mm(dy, b.t());
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t, const GroupArguments&) {
    return at::mm(a.t(), dy);
  }
};

template <typename Rule>
struct MatmulNode : Function<MatmulNode<Rule>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, int64_t dim,
                        const GroupArguments& group) {
    // Each is there for the gradient of the other.
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    ctx->saved_data["dim"] = dim;
    group.save(ctx);
    const BelowAutograd below;
    return Rule::op(a, b, dim, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto group = GroupArguments::load(ctx);
    const auto dim = ctx->saved_data["dim"].toInt();
    return {ctx->needs_input_grad(0) ? Rule::da(grads[0], saved[1], dim, group) : Tensor(),
            ctx->needs_input_grad(1) ? Rule::db(saved[0], grads[0], dim, group) : Tensor(),
            {},
            {}};
  }
};

// Where one rank is alone, torch's own matmul does all, gradients included. Whatever does not fit
// is left to the op, which says what.
bool is_plain_matmul(const Tensor& a, const Tensor& b, int64_t dim, const GroupArguments& group) {
  const bool symbolic = a.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
                        b.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return group.size == 1 && group.algorithm == "auto" && a.dim() == 2 && b.dim() == 2 &&
         (dim == 0 || dim == 1) && a.scalar_type() == b.scalar_type() &&
         is_matmul_dtype(a.scalar_type(), a.device()) && (symbolic || a.size(1) == b.size(0));
}

template <typename Rule>
Tensor matmul_with(const Tensor& a, const Tensor& b, int64_t dim, const GroupArguments& group) {
  check_dense(Rule::kOp, Rule::kA, a);
  check_dense(Rule::kOp, Rule::kB, b);
  check_device(Rule::kOp, Rule::kA, a, Rule::kB, b);
  if (is_plain_matmul(a, b, dim, group)) return at::mm(a, b);
  if (needs_grad(Rule::kOp, {&a, &b})) return MatmulNode<Rule>::apply(a, b, dim, group);
  const at::AutoDispatchBelowADInplaceOrView below;
  return Rule::op(a, b, dim, group);
}

template <typename Rule>
Tensor matmul(const Tensor& a, const Tensor& b, int64_t dim, const std::string& name, int64_t size,
              const std::string& algorithm) {
  return matmul_with<Rule>(a, b, dim, {name, size, algorithm});
}

Tensor differentiable_matmul_all_reduce(const Tensor& a, const Tensor& b, const std::string& name,
                                        int64_t size, const std::string& algorithm) {
  return matmul_with<MatmulAllReduce>(a, b, 0, {name, size, algorithm});
}

// --- Linear --------------------------------------------------------------------------------------

using Triple = std::tuple<Tensor, Tensor, Tensor>;

struct LinearArguments {
  std::vector<std::string> group_names;
  std::vector<int64_t> group_sizes;
  bool sharded;
  int64_t gather_dim;
  int64_t scatter_dim;
  std::string algorithm;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["group_names"] = group_names;
    ctx->saved_data["group_sizes"] = group_sizes;
    ctx->saved_data["layout"] = std::make_tuple(sharded, gather_dim, scatter_dim);
    ctx->saved_data["algorithm"] = algorithm;
  }
  static LinearArguments load(AutogradContext* ctx) {
    const auto [sharded, gather_dim, scatter_dim] =
        ctx->saved_data["layout"].to<std::tuple<bool, int64_t, int64_t>>();
    return {ctx->saved_data["group_names"].to<std::vector<std::string>>(),
            ctx->saved_data["group_sizes"].toIntVector(),
            sharded,
            gather_dim,
            scatter_dim,
            ctx->saved_data["algorithm"].toStringRef()};
  }
};

Triple call_forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const LinearArguments& a, bool save_input, bool save_weight) {
  static const auto op =
      find<Triple(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                  const std::vector<std::string>&, at::IntArrayRef, bool, int64_t, int64_t, bool,
                  bool, const std::string&)>("axonn::linear_forward");
  return op.call(x, weight, bias, a.group_names, a.group_sizes, a.sharded, a.gather_dim,
                 a.scatter_dim, save_input, save_weight, a.algorithm);
}

Triple call_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, bool x_is_full,
                     bool weight_is_full, std::array<bool, 3> mask, const LinearArguments& a) {
  static const auto op =
      find<Triple(const Tensor&, const Tensor&, const Tensor&, bool, bool, std::array<bool, 3>,
                  const std::vector<std::string>&, at::IntArrayRef, bool, int64_t, int64_t,
                  const std::string&)>("axonn::linear_backward");
  return op.call(dy, x, weight, x_is_full, weight_is_full, mask, a.group_names, a.group_sizes,
                 a.sharded, a.gather_dim, a.scatter_dim, a.algorithm);
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
    // Where nothing was gathered, what came in is whole already.
    const bool x_gathered = arguments.sharded && arguments.group_sizes[0] > 1;
    const bool weight_gathered = arguments.group_sizes[2] > 1;
    ctx->saved_data["x_is_full"] = !x_gathered || save_input;
    ctx->saved_data["weight_is_full"] = !weight_gathered || save_weight;
    ctx->saved_data["has_bias"] = bias.has_value();
    // x is there for dweight only.
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
    // A gathered copy has no history; what it was made from has one, so that differentiating a
    // second time is refused here, too.
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
                      bool save_weight, const std::string& algorithm) {
  const LinearArguments arguments{group_names, group_sizes.vec(), sharded,
                                  gather_dim,  scatter_dim,       algorithm};
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
                       const std::string& algorithm) {
  const LinearArguments arguments{group_names, group_sizes.vec(), sharded,
                                  gather_dim,  scatter_dim,       algorithm};
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
  m.impl("all_gather", &collective<AllGather>);
  m.impl("reduce_scatter", &collective<ReduceScatter>);
  m.impl("all_reduce", &differentiable_all_reduce);
  m.impl("all_gather_matmul", &matmul<AllGatherMatmul>);
  m.impl("matmul_all_gather_rhs", &matmul<MatmulAllGatherRhs>);
  m.impl("matmul_reduce_scatter", &matmul<MatmulReduceScatter>);
  m.impl("matmul_all_reduce", &differentiable_matmul_all_reduce);
  m.impl("linear_forward", &linear_forward);
  m.impl("linear_backward", &linear_backward);
}

}  // namespace axonn::ops
