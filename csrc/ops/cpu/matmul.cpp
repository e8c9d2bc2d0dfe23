// Products that a gather feeds or a sum drains.
#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

// Multiplies peers' shards in their memory, as soon as they are published. The gathered matrix is
// stored only if product.cpp joins its parts first.
at::Tensor gather_matmul(const Group& group, const comm::CallSignature& signature,
                         const at::Tensor& a, const at::Tensor& b, bool gathers_a, int64_t dim) {
  const auto& shard = gathers_a ? a : b;
  FusedCall call(group, signature, Gathered::bytes(group, shard));
  Gathered gathered(call, shard, dim), whole(gathers_a ? b : a);
  auto product = gathers_a ? multiply({gathered}, {whole}) : multiply({whole}, {gathered});
  call.compare();
  return product;
}

// Writes the product of the block that a peer owns straight into the slot that the peer reads.
at::Tensor matmul_sum(const Group& group, const comm::CallSignature& signature, const at::Tensor& a,
                      const at::Tensor& b, std::optional<int64_t> scatter_dim) {
  const int64_t rows = a.size(0), columns = b.size(1);
  const auto how = !scatter_dim        ? Drain::kAllReduce
                   : *scatter_dim == 0 ? Drain::kScatterRows
                                       : Drain::kScatterColumns;
  FusedCall call(group, signature, Drained::bytes(group, rows, columns, how, a.options()));
  Drained sum(call, rows, columns, how, a.options());
  Gathered whole_a(a), whole_b(b);
  multiply(sum, {whole_a}, {whole_b});
  return sum.finish();
}

}  // namespace axonn::ops::cpu
