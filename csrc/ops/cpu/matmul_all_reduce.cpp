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

constexpr auto kOp = "matmul_all_reduce";

at::Tensor fused(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0), columns = b.size(1);
  constexpr auto how = Drain::kAllReduce;
  FusedCall call(
      group, comm::CallSignature::of(kOp, {rows, columns, static_cast<int64_t>(a.scalar_type())}),
      Drained::bytes(group, rows, columns, how, a.options()));
  Drained sum(call, rows, columns, how, a.options());
  Gathered whole_a(a), whole_b(b);
  multiply(sum, {whole_a}, {whole_b});
  return sum.finish();
}

at::Tensor chunked(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0);
  auto output = at::empty({rows, b.size(1)}, a.options());
  const int64_t chunks = num_chunks(rows, bytes_of(output));
  std::vector<Pending> sums;
  for (int64_t i = 0; i < chunks; ++i) {
    const auto r = comm::part_of(rows, chunks, i);
    sums.push_back(start_all_reduce(group, at::mm(a.narrow(0, r.begin, r.size()), b)));
  }
  for (int64_t i = 0; i < chunks; ++i) {
    const auto r = comm::part_of(rows, chunks, i);
    sums[i].wait();
    output.narrow(0, r.begin, r.size()).copy_(sums[i].output);
  }
  return output;
}

}  // namespace

at::Tensor matmul_all_reduce(const at::Tensor& a, const at::Tensor& b,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm) {
  check_group_size(kOp, group_size);
  check_matmul(kOp, "a", a, "b", b);
  check_inner(kOp, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a, b);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  const auto run = [&](Algorithm choice) {
    switch (choice) {
      case Algorithm::kFused:
        return fused(group, a, b);
      case Algorithm::kChunked:
        return chunked(group, a, b);
      case Algorithm::kSequential:
        return c10d_all_reduce(group, at::mm(a, b), /*maximum=*/false);
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
            .own_tensor(a)
            .own_tensor(b);
      },
      run);
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &matmul_all_reduce); }

}  // namespace axonn::ops::cpu
