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

constexpr auto kOp = "matmul_all_reduce";

at::Tensor chunked(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0);
  auto output = at::empty({rows, b.size(1)}, a.options());
  drain(
      plan_chunks(output, rows),
      [&](comm::Range r) {
        return start_all_reduce(group, at::mm(a.narrow(0, r.begin, r.size()), b));
      },
      [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
  return output;
}

}  // namespace

at::Tensor matmul_all_reduce_by(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                Algorithm how, bool deterministic) {
  switch (how) {
    case Algorithm::kFused:
      return fused_matmul_all_reduce(group, a, b, deterministic);
    case Algorithm::kChunked:
      return chunked(group, a, b);
    case Algorithm::kSequential:
      return c10d_all_reduce(group, at::mm(a, b), /*maximum=*/false);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor matmul_all_reduce_in(Group& group, const at::Tensor& a, const at::Tensor& b,
                                AskedAlgorithm asked, bool deterministic) {
  // The gradients need no collective, so ranks may differ in which of them they need.
  auto signature = Signature(kOp)
                       .dtype(a)
                       .option("M", a.size(0))
                       .option("N", b.size(1))
                       .own_tensor(a)
                       .own_tensor(b)
                       .device(a.device());
  if (!deterministic) signature.option("deterministic", 0);
  return run_algorithm(
      group, asked,
      {.device = a.device(),
       .can_fuse = group.can_fuse(),
       .is_empty = a.size(0) * b.size(1) == 0,
       .why_no_fused =
           [&] {
             const auto product = all_reduce_product(a.sizes(), b.sizes(), group.size);
             return why_no_fused(a.device(), a.scalar_type(), product, group.size);
           }},
      signature, [&](Algorithm how) {
        const auto call = signature.call(name_of(how));
        if (how == Algorithm::kFused && a.is_cpu()) {
          return cpu::matmul_all_reduce(group, call, a, b);
        }
        return agreed(call, a.device(), {&group},
                      [&] { return matmul_all_reduce_by(group, a, b, how, deterministic); });
      });
}

namespace {

at::Tensor matmul_all_reduce(const at::Tensor& a, const at::Tensor& b,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm, bool deterministic) {
  check_group_size(kOp, group_size);
  check_matmul(kOp, "a", a, "b", b);
  check_inner(kOp, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  const auto asked = parse_algorithm(kOp, algorithm, a.device(), /*fused_on_cuda=*/true);
  if (group_size == 1) return at::mm(a, b);
  auto group = resolve_group(kOp, group_name, group_size, asked, a.device());
  return matmul_all_reduce_in(group, a, b, asked, deterministic);
}

}  // namespace

AXONN_REGISTER_OP(matmul_all_reduce)
AXONN_REGISTER_AUTOCAST(matmul_all_reduce, casts_operands)

}  // namespace axonn::ops
