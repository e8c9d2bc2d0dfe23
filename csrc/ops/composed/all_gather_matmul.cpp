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

class AllGatherMatmul final : public MatmulOp {
 public:
  constexpr AllGatherMatmul() : MatmulOp("all_gather_matmul", "a_shard", "b") {}

  void check(const MatmulCall& in, int64_t group_size) const override {
    check_dim(name, "gather_dim", in.dim, 2);
    check_inner(name, in.dim == 1 ? "a_shard.size(1) * group size" : "a_shard.size(1)",
                in.a.size(1) * (in.dim == 1 ? group_size : 1), "b.size(0)", in.b.size(0));
  }

  void sign(Signature& signature, const MatmulCall& in) const override {
    signature.tensor("a_shard", in.a)
        .option("gather_dim", in.dim)
        .own_tensor(in.b)
        .device(in.a.device())
        .gradients({{"a_shard", in.a}, {"b", in.b}});
  }

  bool is_empty(const MatmulCall& in) const override { return in.a.numel() == 0; }

  FusedProduct product(at::IntArrayRef a, at::IntArrayRef b, int64_t dim,
                       int64_t group_size) const override {
    return dim == 0 ? FusedProduct{Form::kRows, a[0] * group_size, b[1], a[1]}
                    : FusedProduct{Form::kInnerA, a[0], b[1], a[1] * group_size};
  }

  at::Tensor fused_on_cpu(const Group& group, const comm::CallSignature& call,
                          const MatmulCall& in) const override {
    return cpu::gather_matmul(group, call, in.a, in.b, /*gathers_a=*/true, in.dim);
  }

  at::Tensor fused_on_cuda(const Group& group, const MatmulCall& in) const override {
    return fused_gather_matmul(group, in.a, in.b, in.dim == 0 ? Form::kRows : Form::kInnerA);
  }

  // Cuts every shard's rows into chunks. A gathered chunk yields the corresponding rows of the
  // result, in each shard's block (gather_dim 0) or in the only block (gather_dim 1, along K).
  at::Tensor chunked(const Group& group, const MatmulCall& in) const override {
    const int64_t rows = in.a.size(0), num_blocks = in.dim == 0 ? group.size : 1;
    auto output = at::empty({num_blocks, rows, in.b.size(1)}, in.a.options());
    feed(
        plan_chunks(in.a, rows),
        [&](comm::Range r) { return start_all_gather(group, in.a.narrow(0, r.begin, r.size())); },
        [&](comm::Range r, const at::Tensor& gathered) {
          const auto blocks = output.narrow(1, r.begin, r.size());
          if (in.dim == 0) return multiply_blocks(blocks, gathered, for_each(in.b, num_blocks));
          auto block = blocks[0];
          at::mm_out(block, gathered.transpose(0, 1).flatten(1, 2), in.b);
        });
    return output.flatten(0, 1);
  }

  at::Tensor sequential(const Group& group, const MatmulCall& in) const override {
    return at::mm(c10d_all_gather(group, in.a, in.dim), in.b);
  }
};

constexpr auto& all_gather_matmul = run_along_dim<AllGatherMatmul>;

}  // namespace

const MatmulOp& kAllGatherMatmul = kInstance<AllGatherMatmul>;

AXONN_REGISTER_OP(all_gather_matmul)
AXONN_REGISTER_AUTOCAST(all_gather_matmul, casts_operands)

}  // namespace axonn::ops
