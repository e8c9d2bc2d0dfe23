// The common part of the ops that multiply two matrices and gather one of them or sum the product.
// It checks a call, makes the ranks agree on it, and runs it with one of the algorithms. Each op is
// a class in the file of its name, with only the code that is specific to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/algorithm.h"
#include "ops/composed/fused_cuda.h"
#include "ops/group/group.h"
#include "ops/tuning/signature.h"

namespace axonn::ops {

// The arguments of a call, without its group and algorithm.
struct MatmulCall {
  const at::Tensor& a;
  const at::Tensor& b;
  int64_t dim = 0;            // the dim that is gathered or scattered
  bool deterministic = true;  // false: bits of an all-reduce may differ from call to call
};

class MatmulOp {
 public:
  using Form = FusedProduct::Form;

  const char *name, *a_name, *b_name;  // names of the op and its operands in the schema

  // Raises if the arguments do not fit. check_matmul has checked them before.
  virtual void check(const MatmulCall& in, int64_t group_size) const = 0;
  // Adds the arguments to the signature of the call.
  virtual void sign(Signature& signature, const MatmulCall& in) const = 0;
  // Returns whether there is nothing to measure. Reads only values that the ranks agree on.
  virtual bool is_empty(const MatmulCall& in) const = 0;
  // Returns the product that the CUDA kernels would compute, given the sizes of a rank's a and b.
  virtual FusedProduct product(at::IntArrayRef a, at::IntArrayRef b, int64_t dim,
                               int64_t group_size) const = 0;

  // The algorithms, for groups of several ranks. On CPUs, "fused" itself makes the ranks agree on
  // `call`. On CUDA, it is not called with empty operands.
  virtual at::Tensor fused_on_cpu(const Group& group, const comm::CallSignature& call,
                                  const MatmulCall& in) const = 0;
  virtual at::Tensor fused_on_cuda(const Group& group, const MatmulCall& in) const = 0;
  virtual at::Tensor chunked(const Group& group, const MatmulCall& in) const = 0;
  virtual at::Tensor sequential(const Group& group, const MatmulCall& in) const = 0;

 protected:
  constexpr MatmulOp(const char* name, const char* a_name, const char* b_name)
      : name(name), a_name(a_name), b_name(b_name) {}
  ~MatmulOp() = default;
};

// The ops that a Linear is composed of.
extern const MatmulOp &kAllGatherMatmul, &kMatmulAllGatherRhs, &kMatmulReduceScatter,
    &kMatmulAllReduce;

// Runs one algorithm ("fused" is CUDA's). The caller takes care of the group's agreement.
at::Tensor run_agreed(const MatmulOp& op, const Group& group, const MatmulCall& in, Algorithm how);

// Makes the ranks agree on a call, and runs it with the requested algorithm. The caller has checked
// the arguments, and the group has several ranks.
at::Tensor agree_and_run(const MatmulOp& op, Group& group, const MatmulCall& in,
                         AskedAlgorithm asked);

// Checks and runs the whole call; this is the op's kernel.
at::Tensor check_and_run(const MatmulOp& op, const MatmulCall& in, const std::string& group_name,
                         int64_t group_size, const std::string& algorithm);

// The only object of an op's class.
template <typename Op>
inline constexpr Op kInstance;

// The kernel of an op that gathers or scatters along a dim.
template <typename Op>
at::Tensor run_along_dim(const at::Tensor& a, const at::Tensor& b, int64_t dim,
                         const std::string& group_name, int64_t group_size,
                         const std::string& algorithm) {
  return check_and_run(kInstance<Op>, {a, b, dim}, group_name, group_size, algorithm);
}

}  // namespace axonn::ops
