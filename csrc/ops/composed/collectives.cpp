// The ops that are only a collective: fused if the ranks share memory, otherwise run by c10d.
#include "ops/composed/collectives.h"

#include "ops/checks.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/group_arguments.h"
#include "ops/composed/register.h"
#include "ops/fused_cpu.h"
#include "ops/group/agreement.h"
#include "ops/tuning/signature.h"

namespace axonn::ops {
namespace {

struct Collective {
  const char *name, *input, *option;  // names of the op and its arguments in the schema
  bool has_gradient = true;
};

// Makes the ranks agree on a collective, and runs it with one of two functions.
template <typename Fused, typename ByC10d, typename Option>
at::Tensor agree_and_move(const Collective& op, Fused fused, ByC10d by_c10d, Group& group,
                          const at::Tensor& input, Option option) {
  Signature signature(op.name);
  signature.tensor(op.input, input).option(op.option, option).device(input.device());
  if (op.has_gradient) signature.gradients({{op.input, input}});
  // `chunked` and `sequential` are the same here, so ranks may ask for different ones.
  const auto call = signature.call(group.can_fuse() ? "fused" : "c10d");
  if (group.can_fuse()) return fused(group, call, input, option);
  return agreed(call, input.device(), {&group}, [&] { return by_c10d(group, input, option); });
}

}  // namespace

at::Tensor agree_and_all_gather(Group& group, const at::Tensor& shard, int64_t dim) {
  return agree_and_move({"all_gather", "shard", "dim"}, cpu::all_gather, c10d_all_gather, group,
                        shard, dim);
}

at::Tensor agree_and_all_reduce(Group& group, const at::Tensor& input, bool maximum) {
  const Collective op{"all_reduce", "input", "maximum", /*has_gradient=*/!maximum};
  return agree_and_move(op, cpu::all_reduce, c10d_all_reduce, group, input, maximum);
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
  return agree_and_all_gather(group, shard, dim);
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
  return agree_and_move({kOp, "input", "dim"}, cpu::reduce_scatter, c10d_reduce_scatter, group,
                        input, dim);
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
  return agree_and_all_reduce(group, input, reduce_op == "max");
}

}  // namespace

AXONN_REGISTER_OP(all_gather)
AXONN_REGISTER_OP(reduce_scatter)
AXONN_REGISTER_OP(all_reduce)

}  // namespace axonn::ops
