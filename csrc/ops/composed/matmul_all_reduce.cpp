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

class MatmulAllReduce final : public MatmulOp {
 public:
  constexpr MatmulAllReduce() : MatmulOp("matmul_all_reduce", "a", "b") {}

  void check(const MatmulCall& in, int64_t /*group_size*/) const override {
    check_inner(name, "a.size(1)", in.a.size(1), "b.size(0)", in.b.size(0));
  }

  // The gradients need no collective, so ranks may need different ones of them.
  void sign(Signature& signature, const MatmulCall& in) const override {
    signature.dtype(in.a)
        .option("M", in.a.size(0))
        .option("N", in.b.size(1))
        .own_tensor(in.a)
        .own_tensor(in.b)
        .device(in.a.device());
    if (!in.deterministic) signature.option("deterministic", 0);
  }

  bool is_empty(const MatmulCall& in) const override { return in.a.size(0) * in.b.size(1) == 0; }

  FusedProduct product(at::IntArrayRef a, at::IntArrayRef b, int64_t /*dim*/,
                       int64_t group_size) const override {
    return is_summed_by_rows(a[0], b[1], group_size) ? FusedProduct{Form::kTotal, a[0], b[1], a[1]}
                                                     : FusedProduct{Form::kTotal, b[1], a[0], a[1]};
  }

  at::Tensor fused_on_cpu(const Group& group, const comm::CallSignature& call,
                          const MatmulCall& in) const override {
    return cpu::matmul_sum(group, call, in.a, in.b, std::nullopt);
  }

  at::Tensor fused_on_cuda(const Group& group, const MatmulCall& in) const override {
    const bool by_rows = is_summed_by_rows(in.a.size(0), in.b.size(1), group.size);
    return fused_matmul_sum(
        group, in.a, in.b,
        {.everywhere = true, .by_rows = by_rows, .deterministic = in.deterministic});
  }

  at::Tensor chunked(const Group& group, const MatmulCall& in) const override {
    const int64_t rows = in.a.size(0);
    auto output = at::empty({rows, in.b.size(1)}, in.a.options());
    drain(
        plan_chunks(output, rows),
        [&](comm::Range r) {
          return start_all_reduce(group, at::mm(in.a.narrow(0, r.begin, r.size()), in.b));
        },
        [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
    return output;
  }

  at::Tensor sequential(const Group& group, const MatmulCall& in) const override {
    return c10d_all_reduce(group, at::mm(in.a, in.b), /*maximum=*/false);
  }

 private:
  // Returns whether the ranks split the sum by rows. They split it by columns if the group size
  // divides the columns but not the rows.
  static bool is_summed_by_rows(int64_t rows, int64_t columns, int64_t group_size) {
    return rows % group_size == 0 || columns % group_size != 0;
  }
};

at::Tensor matmul_all_reduce(const at::Tensor& a, const at::Tensor& b,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm, bool deterministic) {
  const MatmulCall in{.a = a, .b = b, .deterministic = deterministic};
  return check_and_run(kInstance<MatmulAllReduce>, in, group_name, group_size, algorithm);
}

}  // namespace

const MatmulOp& kMatmulAllReduce = kInstance<MatmulAllReduce>;

AXONN_REGISTER_OP(matmul_all_reduce)
AXONN_REGISTER_AUTOCAST(matmul_all_reduce, casts_operands)

}  // namespace axonn::ops
