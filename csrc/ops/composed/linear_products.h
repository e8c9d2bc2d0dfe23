// The parts of a composed Linear: gathers and products along one axis, with a given algorithm or,
// for kAuto, with the one that is best for each op.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/algorithm.h"
#include "ops/linear_axes.h"
#include "ops/tuning/product.h"

namespace axonn::ops::linear {

// Gathers a tensor on its own and returns it whole along the axis.
at::Tensor gather(const at::Tensor& t, Group& axis, int64_t dim, AskedAlgorithm how);

// "auto" also chooses the fastest way to compute a whole product, where the ranks can agree on it.
// With a named algorithm the product is the library's, so its bits depend on nothing measured.
ProductChoice products_of(const LinearAxes& axes, const char* name);

// Returns a @ b, summed over an axis. With `scatter`, each rank gets its share of the sum along
// `dim`. Only without it can the bits be other than deterministic.
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
