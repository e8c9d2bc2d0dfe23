#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

at::Tensor matmul_all_reduce(const Group& group, const comm::CallSignature& signature,
                             const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0), columns = b.size(1);
  constexpr auto how = Drain::kAllReduce;
  FusedCall call(group, signature, Drained::bytes(group, rows, columns, how, a.options()));
  Drained sum(call, rows, columns, how, a.options());
  Gathered whole_a(a), whole_b(b);
  multiply(sum, {whole_a}, {whole_b});
  return sum.finish();
}

}  // namespace axonn::ops::cpu
