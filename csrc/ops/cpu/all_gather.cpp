#include <torch/library.h>

#include "ops/checks.h"
#include "ops/cpu/fused.h"
#include "ops/cpu/ops.h"

namespace axonn::ops::cpu {

at::Tensor all_gather(const at::Tensor& shard, int64_t dim, const std::string& group_name,
                      int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "all_gather";
  check_group_size(kOp, group_size);
  check_dim(kOp, "dim", dim, shard.dim());
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return shard.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  if (!group.can_fuse()) return c10d_all_gather(group, shard, dim);

  FusedCall call(group,
                 comm::CallSignature::of(kOp, {dim, shard.numel(), shape_hash(shard),
                                               static_cast<int64_t>(shard.scalar_type())}),
                 Gathered::bytes(group, shard));
  Gathered gathered(call, shard, dim);
  return gathered.take();
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("all_gather", &all_gather); }

}  // namespace axonn::ops::cpu
