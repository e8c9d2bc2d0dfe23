#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

at::Tensor all_gather(const Group& group, const comm::CallSignature& signature,
                      const at::Tensor& shard, int64_t dim) {
  FusedCall call(group, signature, Gathered::bytes(group, shard));
  Gathered gathered(call, shard, dim);
  return gathered.take();
}

}  // namespace axonn::ops::cpu
