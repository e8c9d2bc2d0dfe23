#include "ops/cpu/fused.h"
#include "ops/cpu/kernels.h"

namespace axonn::ops::cpu {

at::Tensor all_gather(const Group& group, const at::Tensor& shard, int64_t dim) {
  FusedCall call(group,
                 comm::CallSignature::of("all_gather", {dim, shard.numel(), shape_hash(shard),
                                                        static_cast<int64_t>(shard.scalar_type())}),
                 Gathered::bytes(group, shard));
  Gathered gathered(call, shard, dim);
  return gathered.take();
}

}  // namespace axonn::ops::cpu
