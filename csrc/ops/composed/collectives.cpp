// The ops that are a collective alone: fused where the ranks share memory, else run by c10d.
#include "ops/checks.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/checked_ops.h"
#include "ops/composed/group_arguments.h"
#include "ops/composed/register.h"
#include "ops/fused_cpu.h"
#include "ops/group/agreement.h"
#include "ops/group/group.h"
#include "ops/tuning/signature.h"

namespace axonn::ops {
namespace {

// `chunked` and `sequential` are the same here, so ranks may differ in which they ask for.
const char* kind_of(const Group& group) { return group.can_fuse() ? "fused" : "c10d"; }

}  // namespace

at::Tensor all_gather_in(Group& group, const at::Tensor& shard, int64_t dim) {
  const auto call = Signature("all_gather")
                        .tensor("shard", shard)
                        .option("dim", dim)
                        .device(shard.device())
                        .gradients({{"shard", shard}})
                        .call(kind_of(group));
  if (group.can_fuse()) return cpu::all_gather(group, call, shard, dim);
  return agreed(call, shard.device(), {&group}, [&] { return c10d_all_gather(group, shard, dim); });
}

at::Tensor all_reduce_in(Group& group, const at::Tensor& input, bool maximum) {
  auto signature = Signature("all_reduce");
  signature.tensor("input", input).option("maximum", maximum).device(input.device());
  if (!maximum) signature.gradients({{"input", input}});  // a maximum has no gradient
  const auto call = signature.call(kind_of(group));
  if (group.can_fuse()) return cpu::all_reduce(group, call, input, maximum);
  return agreed(call, input.device(), {&group},
                [&] { return c10d_all_reduce(group, input, maximum); });
}

namespace {

at::Tensor all_gather(const at::Tensor& shard, int64_t dim, const std::string& group_name,
                      int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "all_gather";
  check_group_size(kOp, group_size);
  check_dim(kOp, "dim", dim, shard.dim());
  const auto asked = parse_algorithm(kOp, algorithm, shard.device());
  if (group_size == 1) return shard.clone(at::MemoryFormat::Contiguous);
  auto group = resolve_group(kOp, group_name, group_size, asked, shard.device());
  return all_gather_in(group, shard, dim);
}

at::Tensor reduce_scatter(const at::Tensor& input, int64_t dim, const std::string& group_name,
                          int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "reduce_scatter";
  check_group_size(kOp, group_size);
  check_dim(kOp, "dim", dim, input.dim());
  check_reducible(kOp, "input", input);
  check_divides(kOp, "input", dim, input.size(dim), group_size);
  const auto asked = parse_algorithm(kOp, algorithm, input.device());
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  auto group = resolve_group(kOp, group_name, group_size, asked, input.device());
  const auto call = Signature(kOp)
                        .tensor("input", input)
                        .option("dim", dim)
                        .device(input.device())
                        .gradients({{"input", input}})
                        .call(kind_of(group));
  if (group.can_fuse()) return cpu::reduce_scatter(group, call, input, dim);
  return agreed(call, input.device(), {&group},
                [&] { return c10d_reduce_scatter(group, input, dim); });
}

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op,
                      const std::string& group_name, int64_t group_size,
                      const std::string& algorithm) {
  constexpr auto kOp = "all_reduce";
  check_group_size(kOp, group_size);
  check_reducible(kOp, "input", input);
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "max", kOp,
                    ": reduce_op must be 'sum' or 'max', got '", reduce_op, "'");
  const auto asked = parse_algorithm(kOp, algorithm, input.device());
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  auto group = resolve_group(kOp, group_name, group_size, asked, input.device());
  return all_reduce_in(group, input, reduce_op == "max");
}

}  // namespace

AXONN_REGISTER_OP(all_gather)
AXONN_REGISTER_OP(reduce_scatter)
AXONN_REGISTER_OP(all_reduce)

}  // namespace axonn::ops
