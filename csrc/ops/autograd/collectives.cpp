// Gradients of the collectives; see calls.h.
#include <torch/library.h>

#include <string>

#include "ops/autograd/calls.h"
#include "ops/checks.h"
#include "ops/needs_grad.h"

namespace axonn::ops::autograd {
namespace {

using CollectiveSignature = Tensor(const Tensor&, int64_t, const std::string&, int64_t,
                                   const std::string&);
using AllReduceSignature = Tensor(const Tensor&, const std::string&, const std::string&, int64_t,
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

}  // namespace

TORCH_LIBRARY_IMPL(axonn, Autograd, m) {
  m.impl("all_gather", &collective<AllGather>);
  m.impl("reduce_scatter", &collective<ReduceScatter>);
  m.impl("all_reduce", &differentiable_all_reduce);
}

}  // namespace axonn::ops::autograd
