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

constexpr auto kOp = "matmul_reduce_scatter";

// Cuts every rank's rows into chunks.
at::Tensor chunked_over_rows(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0) / group.size, columns = b.size(1);
  auto output = at::empty({rows, columns}, a.options());
  const auto blocks = a.unflatten(0, {group.size, rows});
  drain(
      plan_chunks(output, rows),
      [&](comm::Range r) {
        auto product = at::empty({group.size, r.size(), columns}, a.options());
        multiply_blocks(product, blocks.narrow(1, r.begin, r.size()), for_each(b, group.size));
        return start_reduce_scatter(group, product);
      },
      [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
  return output;
}

// Cuts the rows into chunks, each of which has every rank's columns.
at::Tensor chunked_over_columns(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0), columns = b.size(1) / group.size;
  auto output = at::empty({rows, columns}, a.options());
  drain(
      plan_chunks(output, rows),
      [&](comm::Range r) {
        const auto product = at::mm(a.narrow(0, r.begin, r.size()), b);
        return start_reduce_scatter(group,
                                    product.view({r.size(), group.size, columns}).transpose(0, 1));
      },
      [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
  return output;
}

}  // namespace

at::Tensor matmul_reduce_scatter_by(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                    int64_t scatter_dim, Algorithm how) {
  switch (how) {
    case Algorithm::kFused:
      return fused_matmul_reduce_scatter(group, a, b, scatter_dim);
    case Algorithm::kChunked:
      return scatter_dim == 0 ? chunked_over_rows(group, a, b) : chunked_over_columns(group, a, b);
    case Algorithm::kSequential:
      return c10d_reduce_scatter(group, at::mm(a, b), scatter_dim);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor matmul_reduce_scatter_in(Group& group, const at::Tensor& a, const at::Tensor& b,
                                    int64_t scatter_dim, AskedAlgorithm asked) {
  const auto signature = Signature(kOp)
                             .dtype(a)
                             .option("M", a.size(0))
                             .option("N", b.size(1))
                             .option("scatter_dim", scatter_dim)
                             .own_tensor(a)
                             .own_tensor(b)
                             .device(a.device())
                             .gradients({{"a", a}, {"b", b}});
  return run_algorithm(
      group, asked,
      {.device = a.device(),
       .can_fuse = group.can_fuse(),
       .is_empty = a.size(0) * b.size(1) == 0,
       .why_no_fused =
           [&] {
             const auto product = reduce_scatter_product(a.sizes(), b.sizes(), scatter_dim);
             return why_no_fused(a.device(), a.scalar_type(), product, group.size);
           }},
      signature, [&](Algorithm how) {
        const auto call = signature.call(name_of(how));
        if (how == Algorithm::kFused && a.is_cpu()) {
          return cpu::matmul_reduce_scatter(group, call, a, b, scatter_dim);
        }
        return agreed(call, a.device(), {&group},
                      [&] { return matmul_reduce_scatter_by(group, a, b, scatter_dim, how); });
      });
}

namespace {

at::Tensor matmul_reduce_scatter(const at::Tensor& a, const at::Tensor& b, int64_t scatter_dim,
                                 const std::string& group_name, int64_t group_size,
                                 const std::string& algorithm) {
  check_group_size(kOp, group_size);
  check_matmul(kOp, "a", a, "b", b);
  check_dim(kOp, "scatter_dim", scatter_dim, 2);
  check_inner(kOp, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  if (scatter_dim == 0) {
    check_divides(kOp, "a", 0, a.size(0), group_size);
  } else {
    check_divides(kOp, "b", 1, b.size(1), group_size);
  }
  const auto asked = parse_algorithm(kOp, algorithm, a.device(), /*fused_on_cuda=*/true);
  if (group_size == 1) return at::mm(a, b);
  auto group = resolve_group(kOp, group_name, group_size, asked, a.device());
  return matmul_reduce_scatter_in(group, a, b, scatter_dim, asked);
}

}  // namespace

AXONN_REGISTER_OP(matmul_reduce_scatter)
AXONN_REGISTER_AUTOCAST(matmul_reduce_scatter, casts_operands)

}  // namespace axonn::ops
