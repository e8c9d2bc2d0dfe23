#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {

at::Tensor all_gather(const at::Tensor& shard, int64_t dim, const std::string& group_name,
                      int64_t group_size, const std::string& algorithm) {
  check_dim("all_gather", "dim", dim, shard.dim());
  check_algorithm("all_gather", algorithm);
  if (group_size == 1) return shard.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group("all_gather", group_name, group_size, algorithm);
  if (!group.fused()) return c10d_all_gather(group, shard, dim);

  const int64_t length = shard.size(dim);
  std::vector<int64_t> sizes = shard.sizes().vec();
  sizes[dim] *= group_size;
  const auto options = shard.options();
  auto output = at::empty(sizes, options);
  comm::Call call(
      *group.shared,
      comm::CallSignature::of("all_gather", {dim, shard.numel(), shape_hash(shard),
                                             static_cast<int64_t>(shard.scalar_type())}),
      slot_bytes(shard.numel(), options));
  shared_tensor(call.workspace(), shard.sizes(), options).copy_(shard);
  call.signal(0);
  for (int64_t step = 0; step < group_size; ++step) {
    const int64_t peer = comm::own_first(group.rank, group_size, step);
    call.wait(peer, 0);
    output.narrow(dim, peer * length, length)
        .copy_(shared_tensor(call.workspace_of(peer), shard.sizes(), options));
  }
  return output;
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("all_gather", &all_gather); }

}  // namespace axonn::ops::cpu
