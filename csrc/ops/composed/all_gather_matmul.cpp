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

constexpr auto kOp = "all_gather_matmul";

// Cuts every shard's rows into chunks. A chunk of every shard gives the corresponding rows of the
// result.
at::Tensor chunked_over_rows(const Group& group, const at::Tensor& a_shard, const at::Tensor& b) {
  const int64_t rows = a_shard.size(0);
  auto output = at::empty({group.size, rows, b.size(1)}, a_shard.options());
  feed(
      plan_chunks(a_shard, rows),
      [&](comm::Range r) { return start_all_gather(group, a_shard.narrow(0, r.begin, r.size())); },
      [&](comm::Range r, const at::Tensor& gathered) {
        multiply_blocks(output.narrow(1, r.begin, r.size()), gathered, for_each(b, group.size));
      });
  return output.flatten(0, 1);
}

// Gathers along K in chunks of rows. A chunk that is gathered whole gives those rows of the result.
at::Tensor chunked_over_columns(const Group& group, const at::Tensor& a_shard,
                                const at::Tensor& b) {
  const int64_t rows = a_shard.size(0);
  auto output = at::empty({rows, b.size(1)}, a_shard.options());
  feed(
      plan_chunks(a_shard, rows),
      [&](comm::Range r) { return start_all_gather(group, a_shard.narrow(0, r.begin, r.size())); },
      [&](comm::Range r, const at::Tensor& gathered) {
        auto block = output.narrow(0, r.begin, r.size());
        at::mm_out(block, gathered.transpose(0, 1).flatten(1, 2), b);
      });
  return output;
}

}  // namespace

at::Tensor all_gather_matmul_by(const Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                                int64_t gather_dim, Algorithm how) {
  switch (how) {
    case Algorithm::kFused:
      return fused_all_gather_matmul(group, a_shard, b, gather_dim);
    case Algorithm::kChunked:
      return gather_dim == 0 ? chunked_over_rows(group, a_shard, b)
                             : chunked_over_columns(group, a_shard, b);
    case Algorithm::kSequential:
      return at::mm(c10d_all_gather(group, a_shard, gather_dim), b);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor all_gather_matmul_in(Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                                int64_t gather_dim, AskedAlgorithm asked) {
  const auto signature = Signature(kOp)
                             .tensor("a_shard", a_shard)
                             .option("gather_dim", gather_dim)
                             .own_tensor(b)
                             .device(a_shard.device())
                             .gradients({{"a_shard", a_shard}, {"b", b}});
  return run_algorithm(
      group, asked,
      {.device = a_shard.device(),
       .can_fuse = group.can_fuse(),
       .is_empty = a_shard.numel() == 0,
       .why_no_fused =
           [&] {
             const auto product =
                 all_gather_product(a_shard.sizes(), b.sizes(), gather_dim, group.size);
             return why_no_fused(a_shard.device(), a_shard.scalar_type(), product, group.size);
           }},
      signature, [&](Algorithm how) {
        const auto call = signature.call(name_of(how));
        if (how == Algorithm::kFused && a_shard.is_cpu()) {
          return cpu::all_gather_matmul(group, call, a_shard, b, gather_dim);
        }
        return agreed(call, a_shard.device(), {&group},
                      [&] { return all_gather_matmul_by(group, a_shard, b, gather_dim, how); });
      });
}

namespace {

at::Tensor all_gather_matmul(const at::Tensor& a_shard, const at::Tensor& b, int64_t gather_dim,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm) {
  check_group_size(kOp, group_size);
  check_matmul(kOp, "a_shard", a_shard, "b", b);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_inner(kOp, gather_dim == 1 ? "a_shard.size(1) * group size" : "a_shard.size(1)",
              a_shard.size(1) * (gather_dim == 1 ? group_size : 1), "b.size(0)", b.size(0));
  const auto asked = parse_algorithm(kOp, algorithm, a_shard.device(), /*fused_on_cuda=*/true);
  if (group_size == 1) return at::mm(a_shard, b);
  auto group = resolve_group(kOp, group_name, group_size, asked, a_shard.device());
  return all_gather_matmul_in(group, a_shard, b, gather_dim, asked);
}

}  // namespace

AXONN_REGISTER_OP(all_gather_matmul)
AXONN_REGISTER_AUTOCAST(all_gather_matmul, casts_operands)

}  // namespace axonn::ops
