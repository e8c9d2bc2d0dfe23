#include "ops/cpu/fused.h"
#include "ops/cpu/kernels.h"

namespace axonn::ops::cpu {

at::Tensor matmul_all_gather_rhs(const Group& group, const at::Tensor& a, const at::Tensor& b_shard,
                                 int64_t gather_dim) {
  FusedCall call(group,
                 comm::CallSignature::of("matmul_all_gather_rhs",
                                         {gather_dim, b_shard.size(0), b_shard.size(1),
                                          static_cast<int64_t>(b_shard.scalar_type())}),
                 Gathered::bytes(group, b_shard));
  Gathered b(call, b_shard, gather_dim);
  Gathered whole_a(a);
  return multiply({whole_a}, {b});
}

}  // namespace axonn::ops::cpu
