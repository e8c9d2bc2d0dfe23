// The gradients of the matmuls with a collective; see calls.h.
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <string>

#include "ops/autograd/calls.h"
#include "ops/checks.h"
#include "ops/needs_grad.h"

namespace axonn::ops::autograd {
namespace {

using MatmulSignature = Tensor(const Tensor&, const Tensor&, int64_t, const std::string&, int64_t,
                               const std::string&);
using MatmulAllReduceSignature = Tensor(const Tensor&, const Tensor&, const std::string&, int64_t,
                                        const std::string&, bool);

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
Tensor matmul_all_reduce(const Tensor& a, const Tensor& b, bool deterministic,
                         const GroupArguments& g) {
  static const auto op = find<MatmulAllReduceSignature>("axonn::matmul_all_reduce");
  return op.call(a, b, g.name, g.size, g.algorithm, deterministic);
}

// The gradients of y = op(a, b, option, group), given dy.
struct AllGatherMatmul {
  static constexpr const char *kOp = "all_gather_matmul", *kA = "a_shard", *kB = "b";
  using Option = int64_t;  // the dimension
  static constexpr auto op = all_gather_matmul;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t dim, const GroupArguments& g) {
    return matmul_reduce_scatter(dy, b.t(), dim, g);
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t dim, const GroupArguments& g) {
    return all_gather_matmul(a.t(), dy, 1 - dim, g);
  }
};

struct MatmulAllGatherRhs {
  static constexpr const char *kOp = "matmul_all_gather_rhs", *kA = "a", *kB = "b_shard";
  using Option = int64_t;  // the dimension
  static constexpr auto op = matmul_all_gather_rhs;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t dim, const GroupArguments& g) {
    return matmul_all_gather_rhs(dy, b.t(), 1 - dim, g);
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t dim, const GroupArguments& g) {
    return matmul_reduce_scatter(a.t(), dy, dim, g);
  }
};

struct MatmulReduceScatter {
  static constexpr const char *kOp = "matmul_reduce_scatter", *kA = "a", *kB = "b";
  using Option = int64_t;  // the dimension
  static constexpr auto op = matmul_reduce_scatter;
  static Tensor da(const Tensor& dy, const Tensor& b, int64_t dim, const GroupArguments& g) {
    return all_gather_matmul(dy, b.t(), dim, g);
  }
  static Tensor db(const Tensor& a, const Tensor& dy, int64_t dim, const GroupArguments& g) {
    return matmul_all_gather_rhs(a.t(), dy, dim, g);
  }
};

struct MatmulAllReduce {
  static constexpr const char *kOp = "matmul_all_reduce", *kA = "a", *kB = "b";
  using Option = bool;  // whether it is deterministic
  static constexpr auto op = matmul_all_reduce;
  static Tensor da(const Tensor& dy, const Tensor& b, bool, const GroupArguments&) {
    return at::mm(dy, b.t());
  }
  static Tensor db(const Tensor& a, const Tensor& dy, bool, const GroupArguments&) {
    return at::mm(a.t(), dy);
  }
};

template <typename Rule>
struct MatmulNode : Function<MatmulNode<Rule>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                        typename Rule::Option option, const GroupArguments& group) {
    // Each operand is saved for the gradient of the other.
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    ctx->saved_data["option"] = option;
    group.save(ctx);
    const BelowAutograd below;
    return Rule::op(a, b, option, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto group = GroupArguments::load(ctx);
    const auto option = ctx->saved_data["option"].to<typename Rule::Option>();
    return {ctx->needs_input_grad(0) ? Rule::da(grads[0], saved[1], option, group) : Tensor(),
            ctx->needs_input_grad(1) ? Rule::db(saved[0], grads[0], option, group) : Tensor(),
            {},
            {}};
  }
};

// With one rank, torch's own matmul does everything, including gradients. Operands that do not fit
// go to the op, whose error says what is wrong.
bool is_plain_matmul(const Tensor& a, const Tensor& b, const GroupArguments& group) {
  const bool symbolic = a.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
                        b.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return group.size == 1 && group.algorithm == "auto" && a.dim() == 2 && b.dim() == 2 &&
         a.scalar_type() == b.scalar_type() && is_matmul_dtype(a.scalar_type()) &&
         (symbolic || a.size(1) == b.size(0));
}

bool is_known(int64_t dim) { return dim == 0 || dim == 1; }
bool is_known(bool) { return true; }

template <typename Rule>
Tensor matmul_with(const Tensor& a, const Tensor& b, typename Rule::Option option,
                   const GroupArguments& group) {
  check_dense(Rule::kOp, Rule::kA, a);
  check_dense(Rule::kOp, Rule::kB, b);
  check_device(Rule::kOp, Rule::kA, a, Rule::kB, b);
  if (is_known(option) && is_plain_matmul(a, b, group)) return at::mm(a, b);
  if (needs_grad(Rule::kOp, {&a, &b})) return MatmulNode<Rule>::apply(a, b, option, group);
  const at::AutoDispatchBelowADInplaceOrView below;
  return Rule::op(a, b, option, group);
}

template <typename Rule>
Tensor matmul(const Tensor& a, const Tensor& b, int64_t dim, const std::string& name, int64_t size,
              const std::string& algorithm) {
  return matmul_with<Rule>(a, b, dim, {name, size, algorithm});
}

Tensor differentiable_matmul_all_reduce(const Tensor& a, const Tensor& b, const std::string& name,
                                        int64_t size, const std::string& algorithm,
                                        bool deterministic) {
  return matmul_with<MatmulAllReduce>(a, b, deterministic, {name, size, algorithm});
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, Autograd, m) {
  m.impl("all_gather_matmul", &matmul<AllGatherMatmul>);
  m.impl("matmul_all_gather_rhs", &matmul<MatmulAllGatherRhs>);
  m.impl("matmul_reduce_scatter", &matmul<MatmulReduceScatter>);
  m.impl("matmul_all_reduce", &differentiable_matmul_all_reduce);
}

}  // namespace axonn::ops::autograd
