#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "ops/checks.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/chunked.h"
#include "ops/composed/matmul_op.h"
#include "ops/composed/register.h"
#include "ops/fused_cpu.h"

namespace axonn::ops {
namespace {

class MatmulAllGatherRhs final : public MatmulOp {
 public:
  constexpr MatmulAllGatherRhs() : MatmulOp("matmul_all_gather_rhs", "a", "b_shard") {}

  void check(const MatmulCall& in, int64_t group_size) const override {
    check_dim(name, "gather_dim", in.dim, 2);
    check_inner(name, "a.size(1)", in.a.size(1),
                in.dim == 0 ? "b_shard.size(0) * group size" : "b_shard.size(0)",
                in.b.size(0) * (in.dim == 0 ? group_size : 1));
  }

  void sign(Signature& signature, const MatmulCall& in) const override {
    signature.tensor("b_shard", in.b)
        .option("gather_dim", in.dim)
        .own_tensor(in.a)
        .device(in.a.device())
        .gradients({{"a", in.a}, {"b_shard", in.b}});
  }

  bool is_empty(const MatmulCall& in) const override { return in.b.numel() == 0; }

  FusedProduct product(at::IntArrayRef a, at::IntArrayRef b, int64_t dim,
                       int64_t group_size) const override {
    return dim == 1 ? FusedProduct{Form::kColumns, a[0], b[1] * group_size, a[1]}
                    : FusedProduct{Form::kInner, a[0], b[1], b[0] * group_size};
  }

  at::Tensor fused_on_cpu(const Group& group, const comm::CallSignature& call,
                          const MatmulCall& in) const override {
    return cpu::gather_matmul(group, call, in.a, in.b, /*gathers_a=*/false, in.dim);
  }

  at::Tensor fused_on_cuda(const Group& group, const MatmulCall& in) const override {
    return fused_gather_matmul(group, in.a, in.b, in.dim == 1 ? Form::kColumns : Form::kInner);
  }

  // Cuts columns into chunks: each rank's own columns (gather_dim 1), or all columns (gather_dim 0,
  // along K). Chunks are sent transposed, because that is how a weight.t() is stored.
  at::Tensor chunked(const Group& group, const MatmulCall& in) const override {
    const int64_t columns = in.b.size(1);
    const int64_t num_blocks = in.dim == 1 ? group.size : 1;
    auto output = at::empty({in.a.size(0), num_blocks * columns}, in.a.options());
    feed(
        plan_chunks(in.b, columns),
        [&](comm::Range c) {
          return start_all_gather(group, in.b.narrow(1, c.begin, c.size()).t());
        },
        [&](comm::Range c, const at::Tensor& gathered) {
          const auto blocks = output.unflatten(1, {num_blocks, columns}).transpose(0, 1);
          const auto b = in.dim == 1 ? gathered.transpose(1, 2)
                                     : gathered.transpose(0, 1).flatten(1, 2).t().unsqueeze(0);
          multiply_blocks(blocks.narrow(2, c.begin, c.size()), for_each(in.a, num_blocks), b);
        });
    return output;
  }

  at::Tensor sequential(const Group& group, const MatmulCall& in) const override {
    return at::mm(in.a, c10d_all_gather(group, in.b, in.dim));
  }
};

constexpr auto& matmul_all_gather_rhs = run_along_dim<MatmulAllGatherRhs>;

}  // namespace

const MatmulOp& kMatmulAllGatherRhs = kInstance<MatmulAllGatherRhs>;

AXONN_REGISTER_OP(matmul_all_gather_rhs)
AXONN_REGISTER_AUTOCAST(matmul_all_gather_rhs, casts_operands)

}  // namespace axonn::ops
