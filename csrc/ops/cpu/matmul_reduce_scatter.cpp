#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

// The product of the block that a peer owns is written straight into the slot that the peer reads.
at::Tensor matmul_reduce_scatter(const Group& group, const comm::CallSignature& signature,
                                 const at::Tensor& a, const at::Tensor& b, int64_t scatter_dim) {
  const int64_t rows = a.size(0), columns = b.size(1);
  const auto how = scatter_dim == 0 ? Drain::kScatterRows : Drain::kScatterColumns;
  FusedCall call(group, signature, Drained::bytes(group, rows, columns, how, a.options()));
  Drained sum(call, rows, columns, how, a.options());
  Gathered whole_a(a), whole_b(b);
  multiply(sum, {whole_a}, {whole_b});
  return sum.finish();
}

}  // namespace axonn::ops::cpu
