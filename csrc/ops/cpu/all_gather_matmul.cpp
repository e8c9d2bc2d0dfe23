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

constexpr auto kOp = "all_gather_matmul";

// Peers' shards are multiplied in their memory, as soon as they are there; the gathered matrix
// exists nowhere.
at::Tensor fused(const Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                 int64_t gather_dim) {
  FusedCall call(group,
                 comm::CallSignature::of(kOp, {gather_dim, a_shard.size(0), a_shard.size(1),
                                               static_cast<int64_t>(a_shard.scalar_type())}),
                 Gathered::bytes(group, a_shard));
  Gathered a(call, a_shard, gather_dim);
  Gathered whole_b(b);
  return multiply({a}, {whole_b});
}

// A chunk of every shard's rows gives those rows of the result.
at::Tensor chunked_over_rows(const Group& group, const at::Tensor& a_shard, const at::Tensor& b) {
  const int64_t rows = a_shard.size(0);
  auto output = at::empty({group.size, rows, b.size(1)}, a_shard.options());
  feed(
      rows, num_chunks(rows, bytes_of(a_shard)),
      [&](comm::Range r) { return start_all_gather(group, a_shard.narrow(0, r.begin, r.size())); },
      [&](comm::Range r, const at::Tensor& gathered) {
        for (int64_t rank = 0; rank < group.size; ++rank) {
          auto block = output[rank].narrow(0, r.begin, r.size());
          at::mm_out(block, gathered[rank], b);
        }
      });
  return output.flatten(0, 1);
}

// Gathered along K: a chunk of rows, gathered whole, gives those rows of the result.
at::Tensor chunked_over_columns(const Group& group, const at::Tensor& a_shard,
                                const at::Tensor& b) {
  const int64_t rows = a_shard.size(0);
  auto output = at::empty({rows, b.size(1)}, a_shard.options());
  feed(
      rows, num_chunks(rows, bytes_of(a_shard)),
      [&](comm::Range r) { return start_all_gather(group, a_shard.narrow(0, r.begin, r.size())); },
      [&](comm::Range r, const at::Tensor& gathered) {
        auto block = output.narrow(0, r.begin, r.size());
        at::mm_out(block, gathered.transpose(0, 1).flatten(1, 2), b);
      });
  return output;
}

}  // namespace

at::Tensor all_gather_matmul(const at::Tensor& a_shard, const at::Tensor& b, int64_t gather_dim,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm) {
  check_group_size(kOp, group_size);
  check_matmul(kOp, "a_shard", a_shard, "b", b);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_inner(kOp, gather_dim == 1 ? "a_shard.size(1) * group size" : "a_shard.size(1)",
              a_shard.size(1) * (gather_dim == 1 ? group_size : 1), "b.size(0)", b.size(0));
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a_shard, b);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  const auto run = [&](Algorithm choice) {
    switch (choice) {
      case Algorithm::kFused:
        return fused(group, a_shard, b, gather_dim);
      case Algorithm::kChunked:
        return gather_dim == 0 ? chunked_over_rows(group, a_shard, b)
                               : chunked_over_columns(group, a_shard, b);
      case Algorithm::kSequential:
        return at::mm(c10d_all_gather(group, a_shard, gather_dim), b);
    }
    TORCH_INTERNAL_ASSERT(false);
  };
  return run_algorithm(
      group, algorithm, {.can_fuse = group.can_fuse(), .is_empty = a_shard.numel() == 0},
      [&] {
        return Signature(kOp)
            .tensor("a_shard", a_shard)
            .option("gather_dim", gather_dim)
            .own_tensor(b);
      },
      run);
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &all_gather_matmul); }

}  // namespace axonn::ops::cpu
