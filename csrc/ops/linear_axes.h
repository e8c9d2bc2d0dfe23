// The axes of a Linear of the 3D matmul, and the results of its passes. The legend is that of
// docs/architecture.md:
//   r  the axis that splits the output's features and, if sharded, the input along gather_dim
//   s  the axis that splits the input's features; the output is summed over it
//   z  the axis that holds the weight's rows in shards
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/algorithm.h"
#include "ops/group/group.h"

namespace axonn::ops {

// The axes of both passes, and how rows or features move along them.
struct LinearAxes {
  Group r, s, z;
  Group all;  // all ranks of the three, if they are to agree on an algorithm; else a single rank
  bool sharded;
  int64_t gather_dim;   // of x along r, and of dx
  int64_t scatter_dim;  // of y along s, and of dy
  AskedAlgorithm asked;
  bool deterministic;  // false: bits of all-reduces may differ from call to call
  c10::Device device;

  bool gathers() const { return sharded && r.size > 1; }
  bool alone() const { return r.size * s.size * z.size == 1; }
  // Whether every axis with several ranks can fuse through shared memory.
  bool can_fuse() const { return device.is_cpu() && fits(r) && fits(s) && fits(z); }

 private:
  static bool fits(const Group& axis) { return axis.size == 1 || axis.can_fuse(); }
};

// Empty tensors stand for results that are not kept or not asked for.
struct LinearOutput {
  at::Tensor y, full_x, full_weight;
};
struct LinearGradients {
  at::Tensor dx, dweight, dbias;
};

inline at::Tensor nothing(const at::Tensor& like) { return like.new_empty({0}); }

}  // namespace axonn::ops
