#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "matmul_all_gather_rhs";

// Columns gathered: each peer's columns of b give columns of the result, read in place.
at::Tensor fused_over_columns(const Group& group, const at::Tensor& a, const at::Tensor& b_shard) {
  const auto options = b_shard.options();
  const int64_t columns = b_shard.size(1);
  // Stored as the transpose on every rank, whatever its strides here: a weight.t() is copied in one
  // piece.
  const std::array<int64_t, 2> stored{columns, b_shard.size(0)};
  const auto read = [&](const std::byte* data) { return shared_tensor(data, stored, options).t(); };
  auto output = at::empty({a.size(0), columns * group.size}, options);
  comm::Call call(*group.shared,
                  comm::CallSignature::of(
                      kOp, {b_shard.size(0), columns, static_cast<int64_t>(b_shard.scalar_type())}),
                  slot_bytes(b_shard.numel(), options));
  read(call.workspace()).copy_(b_shard);
  call.signal(0);
  for (int64_t step = 0; step < group.size; ++step) {
    const int64_t peer = comm::own_first(group.rank, group.size, step);
    call.wait(peer, 0);
    auto block = output.narrow(1, peer * columns, columns);
    at::mm_out(block, a, read(call.workspace_of(peer)));
  }
  return output;
}

}  // namespace

at::Tensor matmul_all_gather_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t gather_dim,
                                 const std::string& group_name, int64_t group_size,
                                 const std::string& algorithm) {
  check_matmul(kOp, "a", a, "b_shard", b_shard);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_inner(kOp, "a.size(1)", a.size(1),
              gather_dim == 0 ? "b_shard.size(0) * group size" : "b_shard.size(0)",
              b_shard.size(0) * (gather_dim == 0 ? group_size : 1));
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a, b_shard);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  if (group.fused() && gather_dim == 1) return fused_over_columns(group, a, b_shard);
  return at::mm(a, all_gather(b_shard, gather_dim, group_name, group_size, algorithm));
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &matmul_all_gather_rhs); }

}  // namespace axonn::ops::cpu
