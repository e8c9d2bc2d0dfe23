// The parts of cross-entropy that read or write logits, one row at a time. A row is read in its own
// dtype, and nothing of its size is written except the gradient. Arithmetic is in float (double for
// float64), in an order that depends only on the number of columns, with the same bits on every
// x86-64.
#pragma once

#include <cstdint>

#include "core/numeric/data_type.h"

namespace axonn::kernels {

// The numbers that softmax needs from a row. They are floats unless the logits are float64.
struct RowStatistics {
  double top;  // the largest logit; -inf if there is none
  double sum;  // of exp(logit - top); 0 if all logits are -inf, NaN if one is NaN or +inf
};

// Returns the statistics of a floating-point row. Reads the row once, in blocks that fit in L1.
// Terms below 2e-38 count as zero, except those of float64.
RowStatistics scan_logits(const void* row, int64_t columns, DataType dtype);

// Returns one logit.
double logit_at(const void* row, int64_t column, DataType dtype);

// Sets out = (softmax - onehot) * dy; `statistics` are those of the whole row over all ranks.
// label: the column of onehot's one; -1 if another rank holds it. `out` may be `row`.
void cross_entropy_gradient(void* out, const void* row, int64_t columns, DataType dtype,
                            const RowStatistics& statistics, double dy, int64_t label);

}  // namespace axonn::kernels
