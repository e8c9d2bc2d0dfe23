// The skeleton of the ops that multiply two matrices and gather one of them or sum the product. It
// checks a call, lets the ranks agree on it, and runs it with one of the algorithms. An op is a
// class in the file of its name, which has only what is particular to it.
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
  int64_t dim = 0;            // that is gathered or scattered
  bool deterministic = true;  // or the bits of an all-reduce may differ from call to call
};

class MatmulOp {
 public:
  using Form = FusedProduct::Form;

  const char *name, *a_name, *b_name;  // of the op and its operands, as in its schema

  // Raises for arguments that do not fit, after check_matmul.
  virtual void check(const MatmulCall& in, int64_t group_size) const = 0;
  // Adds the arguments to the signature of the call.
  virtual void sign(Signature& signature, const MatmulCall& in) const = 0;
  // Returns whether there is nothing to measure. Reads only what ranks agree on.
  virtual bool is_empty(const MatmulCall& in) const = 0;
  // Returns what CUDA's kernels would compute, from the sizes of a rank's a and b.
  virtual FusedProduct product(at::IntArrayRef a, at::IntArrayRef b, int64_t dim,
                               int64_t group_size) const = 0;

  // The algorithms, for groups of several ranks. "fused" on CPUs makes the ranks agree on `call`
  // itself. On CUDA it is not asked for products without an element.
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

// The ops of which a Linear is composed.
extern const MatmulOp &kAllGatherMatmul, &kMatmulAllGatherRhs, &kMatmulReduceScatter,
    &kMatmulAllReduce;

// Runs one algorithm ("fused" is CUDA's) in a group whose agreement the caller has made.
at::Tensor run_agreed(const MatmulOp& op, const Group& group, const MatmulCall& in, Algorithm how);

// Lets the ranks agree on a call and runs it with the algorithm that was asked for. The caller has
// checked the arguments, and the group has several ranks.
at::Tensor agree_and_run(const MatmulOp& op, Group& group, const MatmulCall& in,
                         AskedAlgorithm asked);

// Makes the whole call, as the op's kernel.
at::Tensor check_and_run(const MatmulOp& op, const MatmulCall& in, const std::string& group_name,
                         int64_t group_size, const std::string& algorithm);

// The object of an op's class.
template <typename Op>
inline constexpr Op kInstance;

// The kernel of an op that gathers or scatters a dimension.
template <typename Op>
at::Tensor run_along_dim(const at::Tensor& a, const at::Tensor& b, int64_t dim,
                         const std::string& group_name, int64_t group_size,
                         const std::string& algorithm) {
  return check_and_run(kInstance<Op>, {a, b, dim}, group_name, group_size, algorithm);
}

}  // namespace axonn::ops
