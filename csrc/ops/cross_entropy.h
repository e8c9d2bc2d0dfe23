// Helpers that the cross-entropy kernels of all backends share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "core/numeric/data_type.h"
#include "ops/checks.h"

namespace axonn::ops {

// The dtype in which statistics and losses are computed and kept.
inline c10::ScalarType statistics_dtype(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline kernels::DataType logits_dtype(const at::Tensor& logits) {
  if (logits.scalar_type() == at::kHalf) return kernels::DataType::kFloat16;
  return data_type(logits.scalar_type());
}

// Returns whether kernels can read the logits in place and overwrite each of them.
inline bool has_dense_rows(const at::Tensor& logits) {
  return (logits.size(1) <= 1 || logits.stride(1) == 1) &&
         (logits.size(0) <= 1 || logits.stride(0) >= logits.size(1));
}

}  // namespace axonn::ops
