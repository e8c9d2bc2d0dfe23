#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

// Peers' shards are multiplied in their memory, as soon as they are there; the gathered matrix is
// never stored.
at::Tensor all_gather_matmul(const Group& group, const comm::CallSignature& signature,
                             const at::Tensor& a_shard, const at::Tensor& b, int64_t gather_dim) {
  FusedCall call(group, signature, Gathered::bytes(group, a_shard));
  Gathered a(call, a_shard, gather_dim);
  Gathered whole_b(b);
  auto product = multiply({a}, {whole_b});
  call.compare();
  return product;
}

}  // namespace axonn::ops::cpu
