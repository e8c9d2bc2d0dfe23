// What a composed Linear is made of: gathers and products along one axis, by an algorithm or, for
// kAuto, as each op itself finds best.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/algorithm.h"
#include "ops/linear_axes.h"
#include "ops/tuning/product.h"

namespace axonn::ops::linear {

// Whole along an axis: gathered on its own.
at::Tensor gather(const at::Tensor& t, Group& axis, int64_t dim, AskedAlgorithm how);

// "auto" stands for the fastest way to compute a whole product, too, where the ranks can agree on
// it. An algorithm that is named has the library's product: its bits depend on nothing measured.
ProductChoice products_of(const LinearAxes& axes, const char* name);

// a @ b, summed over an axis; `scatter`: of the sum each rank gets its share along `dim`.
at::Tensor multiply(const ProductChoice& products, const at::Tensor& a, const at::Tensor& b,
                    Group& axis, bool scatter, int64_t dim, AskedAlgorithm how);

// A product with what is gathered along z.
at::Tensor feed_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t dim, Group& axis,
                    AskedAlgorithm how);

// A product of what is gathered along r.
at::Tensor feed_lhs(const at::Tensor& a_shard, const at::Tensor& b, int64_t dim, Group& axis,
                    AskedAlgorithm how);

}  // namespace axonn::ops::linear
