#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

at::Tensor matmul_all_gather_rhs(const Group& group, const comm::CallSignature& signature,
                                 const at::Tensor& a, const at::Tensor& b_shard,
                                 int64_t gather_dim) {
  FusedCall call(group, signature, Gathered::bytes(group, b_shard));
  Gathered b(call, b_shard, gather_dim);
  Gathered whole_a(a);
  auto product = multiply({whole_a}, {b});
  call.compare();
  return product;
}

}  // namespace axonn::ops::cpu
