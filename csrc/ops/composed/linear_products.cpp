#include "ops/composed/linear_products.h"

#include "ops/composed/c10d_collectives.h"
#include "ops/composed/collectives.h"
#include "ops/composed/matmul_op.h"

namespace axonn::ops::linear {
namespace {

at::Tensor run_op(const MatmulOp& op, Group& axis, const MatmulCall& in, AskedAlgorithm how) {
  return how == kAuto ? agree_and_run(op, axis, in, how) : run_agreed(op, axis, in, *how);
}

}  // namespace

at::Tensor gather(const at::Tensor& t, Group& axis, int64_t dim, AskedAlgorithm how) {
  if (axis.size == 1) return t;
  if (how == kAuto) return agree_and_all_gather(axis, t, dim);
  return c10d_all_gather(axis, t, dim);
}

ProductChoice products_of(const LinearAxes& axes, const char* name) {
  if (axes.asked != kAuto) return {nullptr, name};
  if (axes.alone()) return {&axes.r, name};  // one rank, which decides by itself
  return {axes.all.size > 1 ? &axes.all : nullptr, name};
}

at::Tensor multiply(const ProductChoice& products, const at::Tensor& a, const at::Tensor& b,
                    Group& axis, bool scatter, int64_t dim, AskedAlgorithm how,
                    bool deterministic) {
  if (axis.size == 1) return products.mm(a, b);
  if (how == Algorithm::kSequential) {
    const auto product = products.mm(a, b);
    return scatter ? c10d_reduce_scatter(axis, product, dim)
                   : c10d_all_reduce(axis, product, /*maximum=*/false);
  }
  return run_op(scatter ? kMatmulReduceScatter : kMatmulAllReduce, axis, {a, b, dim, deterministic},
                how);
}

at::Tensor feed_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t dim, Group& axis,
                    AskedAlgorithm how) {
  return run_op(kMatmulAllGatherRhs, axis, {a, b_shard, dim}, how);
}

at::Tensor feed_lhs(const at::Tensor& a_shard, const at::Tensor& b, int64_t dim, Group& axis,
                    AskedAlgorithm how) {
  return run_op(kAllGatherMatmul, axis, {a_shard, b, dim}, how);
}

}  // namespace axonn::ops::linear
