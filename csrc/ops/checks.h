// Argument checks at the op boundary; each check is made once. Messages name the op, the argument,
// the expected value and the given one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "core/numeric/data_type.h"

namespace axonn::ops {

// The dtypes whose sums are accumulated in a wider type: fp32.
inline bool is_16_bit_float(c10::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

inline bool is_matmul_dtype(c10::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || is_16_bit_float(type);
}

inline bool is_reducible(c10::ScalarType type) {
  return is_matmul_dtype(type) || type == at::kLong;
}

inline kernels::DataType data_type(c10::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kernels::DataType::kFloat32;
    case at::kDouble:
      return kernels::DataType::kFloat64;
    case at::kBFloat16:
      return kernels::DataType::kBFloat16;
    case at::kHalf:
      return kernels::DataType::kFloat16;
    case at::kLong:
      return kernels::DataType::kInt64;
    default:
      TORCH_CHECK_TYPE(false, "no kernel for dtype ", type);
  }
}

inline void check_reducible(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(is_reducible(t.scalar_type()), op, ": ", name, " has dtype ", t.scalar_type(),
                   ", expected float32, float64, bfloat16, float16 or int64");
}

// This and check_device check what the dispatcher relies on to pick a kernel. They run before it: a
// meta tensor next to a CPU tensor would otherwise go to the fake.
inline void check_dense(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op, ": ", name, " must be a Tensor, got None");
  TORCH_CHECK_TYPE(t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized(), op, ": ",
                   name, " must be a dense tensor, got one that is ",
                   t.is_nested()      ? "nested"
                   : t.is_quantized() ? "quantized"
                                      : c10::str("of layout ", t.layout()));
}

inline void check_device(const char* op, const char* a_name, const at::Tensor& a,
                         const char* b_name, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.device() == b.device(), op, ": ", a_name, " is on ", a.device(), " but ",
                    b_name, " is on ", b.device());
}

inline void check_group_size(const char* op, int64_t size) {
  TORCH_CHECK_VALUE(size >= 1, op, ": group_size must be at least 1, got ", size);
}

inline void check_dim(const char* op, const char* name, int64_t dim, int64_t num_dims) {
  TORCH_CHECK_VALUE(0 <= dim && dim < num_dims, op, ": ", name, "=", dim, " must be in [0, ",
                    num_dims, ")");
}

// Checks that a and b are matrices with the same floating dtype, on the same device. The op itself
// checks that their sizes fit.
inline void check_matmul(const char* op, const char* a_name, const at::Tensor& a,
                         const char* b_name, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 2, op, ": ", a_name, " must be a matrix, got shape ", a.sizes());
  TORCH_CHECK_VALUE(b.dim() == 2, op, ": ", b_name, " must be a matrix, got shape ", b.sizes());
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), op, ": ", a_name, " has dtype ",
                   a.scalar_type(), " but ", b_name, " has ", b.scalar_type());
  TORCH_CHECK_TYPE(is_matmul_dtype(a.scalar_type()), op, ": ", a_name, " has dtype ",
                   a.scalar_type(), ", expected float32, float64, bfloat16 or float16");
  check_device(op, a_name, a, b_name, b);
}

inline void check_inner(const char* op, const char* a_text, int64_t a_size, const char* b_text,
                        int64_t b_size) {
  TORCH_CHECK_VALUE(a_size == b_size, op, ": ", a_text, "=", a_size, " must equal ", b_text, "=",
                    b_size);
}

inline void check_divides(const char* op, const char* name, int64_t dim, int64_t size,
                          int64_t group_size) {
  TORCH_CHECK_VALUE(size % group_size == 0, op, ": ", name, ".size(", dim, ")=", size,
                    " must be divisible by the group size ", group_size);
}

}  // namespace axonn::ops
