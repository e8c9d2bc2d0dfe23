#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "ops/checks.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/checked_ops.h"
#include "ops/composed/chunked.h"
#include "ops/composed/fused_cuda.h"
#include "ops/composed/group_arguments.h"
#include "ops/composed/register.h"
#include "ops/fused_cpu.h"
#include "ops/group/agreement.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {
namespace {

constexpr auto kOp = "matmul_all_gather_rhs";

// Cuts columns into chunks: each rank's own columns (gather_dim 1), or all columns (gather_dim 0,
// along K). Chunks are sent transposed, which is how a weight.t() lies in memory.
at::Tensor chunked(const Group& group, const at::Tensor& a, const at::Tensor& b_shard,
                   int64_t gather_dim) {
  const int64_t columns = b_shard.size(1);
  const int64_t num_blocks = gather_dim == 1 ? group.size : 1;
  auto output = at::empty({a.size(0), num_blocks * columns}, a.options());
  feed(
      plan_chunks(b_shard, columns),
      [&](comm::Range c) {
        return start_all_gather(group, b_shard.narrow(1, c.begin, c.size()).t());
      },
      [&](comm::Range c, const at::Tensor& gathered) {
        const auto blocks = output.unflatten(1, {num_blocks, columns}).transpose(0, 1);
        const auto b = gather_dim == 1 ? gathered.transpose(1, 2)
                                       : gathered.transpose(0, 1).flatten(1, 2).t().unsqueeze(0);
        multiply_blocks(blocks.narrow(2, c.begin, c.size()), for_each(a, num_blocks), b);
      });
  return output;
}

}  // namespace

at::Tensor matmul_all_gather_rhs_by(const Group& group, const at::Tensor& a,
                                    const at::Tensor& b_shard, int64_t gather_dim, Algorithm how) {
  switch (how) {
    case Algorithm::kFused:
      return fused_matmul_all_gather_rhs(group, a, b_shard, gather_dim);
    case Algorithm::kChunked:
      return chunked(group, a, b_shard, gather_dim);
    case Algorithm::kSequential:
      return at::mm(a, c10d_all_gather(group, b_shard, gather_dim));
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor matmul_all_gather_rhs_in(Group& group, const at::Tensor& a, const at::Tensor& b_shard,
                                    int64_t gather_dim, AskedAlgorithm asked) {
  const auto signature = Signature(kOp)
                             .tensor("b_shard", b_shard)
                             .option("gather_dim", gather_dim)
                             .own_tensor(a)
                             .device(a.device())
                             .gradients({{"a", a}, {"b_shard", b_shard}});
  return run_algorithm(group, asked,
                       {.device = a.device(),
                        .can_fuse = group.can_fuse(),
                        .is_empty = b_shard.numel() == 0,
                        .why_no_fused =
                            [&] {
                              const auto product = all_gather_rhs_product(
                                  a.sizes(), b_shard.sizes(), gather_dim, group.size);
                              return why_no_fused(a.device(), a.scalar_type(), product, group.size);
                            }},
                       signature, [&](Algorithm how) {
                         const auto call = signature.call(name_of(how));
                         if (how == Algorithm::kFused && a.is_cpu()) {
                           return cpu::matmul_all_gather_rhs(group, call, a, b_shard, gather_dim);
                         }
                         return agreed(call, a.device(), {&group}, [&] {
                           return matmul_all_gather_rhs_by(group, a, b_shard, gather_dim, how);
                         });
                       });
}

namespace {

at::Tensor matmul_all_gather_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t gather_dim,
                                 const std::string& group_name, int64_t group_size,
                                 const std::string& algorithm) {
  check_group_size(kOp, group_size);
  check_matmul(kOp, "a", a, "b_shard", b_shard);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_inner(kOp, "a.size(1)", a.size(1),
              gather_dim == 0 ? "b_shard.size(0) * group size" : "b_shard.size(0)",
              b_shard.size(0) * (gather_dim == 0 ? group_size : 1));
  const auto asked = parse_algorithm(kOp, algorithm, a.device(), /*fused_on_cuda=*/true);
  if (group_size == 1) return at::mm(a, b_shard);
  auto group = resolve_group(kOp, group_name, group_size, asked, a.device());
  return matmul_all_gather_rhs_in(group, a, b_shard, gather_dim, asked);
}

}  // namespace

AXONN_REGISTER_OP(matmul_all_gather_rhs)
AXONN_REGISTER_AUTOCAST(matmul_all_gather_rhs, casts_operands)

}  // namespace axonn::ops
