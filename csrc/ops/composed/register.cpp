// The same functions serve every device: what differs between them is below, in ATen and c10d.
#include <torch/library.h>

#include "ops/composed/ops.h"

namespace axonn::ops {
namespace {

void implement(torch::Library& m) {
  m.impl("all_gather", &all_gather);
  m.impl("reduce_scatter", &reduce_scatter);
  m.impl("all_reduce", &all_reduce);
  m.impl("all_gather_matmul", &all_gather_matmul);
  m.impl("matmul_all_gather_rhs", &matmul_all_gather_rhs);
  m.impl("matmul_reduce_scatter", &matmul_reduce_scatter);
  m.impl("matmul_all_reduce", &matmul_all_reduce);
  m.impl("linear_forward", &linear_forward);
  m.impl("linear_backward", &linear_backward);
  m.impl("local_rows", &local_rows);
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(axonn, CUDA, m) { implement(m); }

}  // namespace axonn::ops
