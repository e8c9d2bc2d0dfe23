#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "all_gather_matmul";

// Rows gathered: each peer's rows are multiplied in place, in its memory, as soon as they are
// there; the gathered matrix exists nowhere.
at::Tensor fused_over_rows(const Group& group, const at::Tensor& a_shard, const at::Tensor& b) {
  const auto options = a_shard.options();
  const int64_t rows = a_shard.size(0);
  auto output = at::empty({rows * group.size, b.size(1)}, options);
  comm::Call call(*group.shared,
                  comm::CallSignature::of(
                      kOp, {rows, a_shard.size(1), static_cast<int64_t>(a_shard.scalar_type())}),
                  slot_bytes(a_shard.numel(), options));
  shared_tensor(call.workspace(), a_shard.sizes(), options).copy_(a_shard);
  call.signal(0);
  for (int64_t step = 0; step < group.size; ++step) {
    const int64_t peer = comm::own_first(group.rank, group.size, step);
    call.wait(peer, 0);
    auto block = output.narrow(0, peer * rows, rows);
    at::mm_out(block, shared_tensor(call.workspace_of(peer), a_shard.sizes(), options), b);
  }
  return output;
}

}  // namespace

at::Tensor all_gather_matmul(const at::Tensor& a_shard, const at::Tensor& b, int64_t gather_dim,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm) {
  check_matmul(kOp, "a_shard", a_shard, "b", b);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_inner(kOp, gather_dim == 1 ? "a_shard.size(1) * group size" : "a_shard.size(1)",
              a_shard.size(1) * (gather_dim == 1 ? group_size : 1), "b.size(0)", b.size(0));
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a_shard, b);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  if (group.fused() && gather_dim == 0) return fused_over_rows(group, a_shard, b);
  // Gathered along K, every part is needed by every element of the result: one matmul over the
  // gathered matrix keeps its sums in the accumulator, where a matmul a part would round them.
  return at::mm(all_gather(a_shard, gather_dim, group_name, group_size, algorithm), b);
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &all_gather_matmul); }

}  // namespace axonn::ops::cpu
