// The parts of a composed Linear: gathers and products along one axis, with a given algorithm or,
// for kAuto, with the best one for each op.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/algorithm.h"
#include "ops/linear_axes.h"
#include "ops/tuning/product.h"

namespace axonn::ops::linear {

// Gathers a tensor on its own, not as part of a product, and returns it whole along the axis.
at::Tensor gather(const at::Tensor& t, Group& axis, int64_t dim, AskedAlgorithm how);

// "auto" also chooses the fastest way to compute a whole product, if the ranks can agree on it.
// With a named algorithm the library computes the product, so its bits depend on no measurement.
ProductChoice products_of(const LinearAxes& axes, const char* name);

// Returns a @ b, summed over an axis. With `scatter`, each rank gets its share of the sum along
// `dim`. Without it, the bits may vary from call to call if `deterministic` is false.
at::Tensor multiply(const ProductChoice& products, const at::Tensor& a, const at::Tensor& b,
                    Group& axis, bool scatter, int64_t dim, AskedAlgorithm how,
                    bool deterministic = true);

// Returns a product whose right operand is gathered along z.
at::Tensor feed_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t dim, Group& axis,
                    AskedAlgorithm how);

// Returns a product whose left operand is gathered along r.
at::Tensor feed_lhs(const at::Tensor& a_shard, const at::Tensor& b, int64_t dim, Group& axis,
                    AskedAlgorithm how);

}  // namespace axonn::ops::linear
