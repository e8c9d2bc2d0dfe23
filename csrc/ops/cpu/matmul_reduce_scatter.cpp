#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/cpu/chunked.h"
#include "ops/cpu/fused.h"
#include "ops/cpu/ops.h"
#include "ops/tuner.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "matmul_reduce_scatter";

// The block that a peer owns is multiplied straight into the slot that it reads.
at::Tensor fused(const Group& group, const at::Tensor& a, const at::Tensor& b,
                 int64_t scatter_dim) {
  const int64_t rows = a.size(0), columns = b.size(1);
  const auto how = scatter_dim == 0 ? Drain::kScatterRows : Drain::kScatterColumns;
  FusedCall call(group,
                 comm::CallSignature::of(
                     kOp, {scatter_dim, rows, columns, static_cast<int64_t>(a.scalar_type())}),
                 Drained::bytes(group, rows, columns, how, a.options()));
  Drained sum(call, rows, columns, how, a.options());
  Gathered whole_a(a), whole_b(b);
  multiply(sum, {whole_a}, {whole_b});
  return sum.finish();
}

// Chunks of every rank's rows.
at::Tensor chunked_over_rows(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0) / group.size, columns = b.size(1);
  auto output = at::empty({rows, columns}, a.options());
  drain(
      group, rows, num_chunks(rows, bytes_of(output)),
      [&](comm::Range r) {
        auto stacked = at::empty({group.size, r.size(), columns}, a.options());
        for (int64_t rank = 0; rank < group.size; ++rank) {
          auto block = stacked[rank];
          at::mm_out(block, a.narrow(0, rank * rows + r.begin, r.size()), b);
        }
        return stacked;
      },
      [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
  return output;
}

// Chunks of all rows, each with every rank's columns.
at::Tensor chunked_over_columns(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0), columns = b.size(1) / group.size;
  auto output = at::empty({rows, columns}, a.options());
  drain(
      group, rows, num_chunks(rows, bytes_of(output)),
      [&](comm::Range r) {
        const auto product = at::mm(a.narrow(0, r.begin, r.size()), b);
        return product.view({r.size(), group.size, columns}).transpose(0, 1);
      },
      [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
  return output;
}

}  // namespace

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
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a, b);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  const auto run = [&](Algorithm choice) {
    switch (choice) {
      case Algorithm::kFused:
        return fused(group, a, b, scatter_dim);
      case Algorithm::kChunked:
        return scatter_dim == 0 ? chunked_over_rows(group, a, b)
                                : chunked_over_columns(group, a, b);
      case Algorithm::kSequential:
        return c10d_reduce_scatter(group, at::mm(a, b), scatter_dim);
    }
    TORCH_INTERNAL_ASSERT(false);
  };
  return run_algorithm(
      group, algorithm, {.can_fuse = group.can_fuse(), .is_empty = a.size(0) * b.size(1) == 0},
      [&] {
        return Signature(kOp)
            .dtype(a)
            .option("M", a.size(0))
            .option("N", b.size(1))
            .option("scatter_dim", scatter_dim)
            .own_tensor(a)
            .own_tensor(b);
      },
      run);
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &matmul_reduce_scatter); }

}  // namespace axonn::ops::cpu
