#include "ops/composed/linear_products.h"

#include "ops/composed/c10d_collectives.h"
#include "ops/composed/checked_ops.h"

namespace axonn::ops::linear {

at::Tensor gather(const at::Tensor& t, Group& axis, int64_t dim, AskedAlgorithm how) {
  if (axis.size == 1) return t;
  if (how == kAuto) return all_gather_in(axis, t, dim);
  return c10d_all_gather(axis, t, dim);
}

ProductChoice products_of(const LinearAxes& axes, const char* name) {
  if (axes.asked != kAuto) return {nullptr, name};
  if (axes.alone()) return {&axes.r, name};  // each rank has a product of its own
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
  if (how == kAuto) {
    return scatter ? matmul_reduce_scatter_in(axis, a, b, dim, how)
                   : matmul_all_reduce_in(axis, a, b, how, deterministic);
  }
  return scatter ? matmul_reduce_scatter_by(axis, a, b, dim, *how)
                 : matmul_all_reduce_by(axis, a, b, *how, deterministic);
}

at::Tensor feed_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t dim, Group& axis,
                    AskedAlgorithm how) {
  if (how == kAuto) return matmul_all_gather_rhs_in(axis, a, b_shard, dim, how);
  return matmul_all_gather_rhs_by(axis, a, b_shard, dim, *how);
}

at::Tensor feed_lhs(const at::Tensor& a_shard, const at::Tensor& b, int64_t dim, Group& axis,
                    AskedAlgorithm how) {
  if (how == kAuto) return all_gather_matmul_in(axis, a_shard, b, dim, how);
  return all_gather_matmul_by(axis, a_shard, b, dim, *how);
}

}  // namespace axonn::ops::linear
