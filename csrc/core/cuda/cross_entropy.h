// Row-wise cross-entropy (csrc/core/numeric/cross_entropy.h) on the device. Results equal the CPU's
// up to rounding, because a row is summed in a different order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/numeric/data_type.h"

namespace axonn::kernels::cuda {

// One rank's logits and their labels. Rows are row_stride elements apart; the elements of a row are
// contiguous.
struct LogitRows {
  const void* logits;
  const int64_t* labels;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t first_column;
  int64_t ignore_index;
};

// Writes three numbers per row: top[r], sum[r] and the label's logit, which is 0 if another rank
// holds it. `found` [3, rows] holds floats, or doubles for float64. Rows without a label get 0, 1
// and 0. Only enqueues the work.
cudaError_t cross_entropy_scan(const LogitRows& rows, void* found, DataType dtype,
                               cudaStream_t stream);

// Writes (softmax - onehot) * dy to out, whose rows are out_row_stride elements apart, and zeros to
// rows without a label. dy [rows]; statistics [2, rows] hold top and sum over all ranks. `out` may
// alias the logits. Only enqueues the work.
cudaError_t cross_entropy_gradient(const LogitRows& rows, const void* dy, const void* statistics,
                                   void* out, int64_t out_row_stride, DataType dtype,
                                   cudaStream_t stream);

}  // namespace axonn::kernels::cuda
