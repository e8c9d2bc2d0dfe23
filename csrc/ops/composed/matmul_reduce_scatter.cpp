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

class MatmulReduceScatter final : public MatmulOp {
 public:
  constexpr MatmulReduceScatter() : MatmulOp("matmul_reduce_scatter", "a", "b") {}

  void check(const MatmulCall& in, int64_t group_size) const override {
    check_dim(name, "scatter_dim", in.dim, 2);
    check_inner(name, "a.size(1)", in.a.size(1), "b.size(0)", in.b.size(0));
    if (in.dim == 0) {
      check_divides(name, "a", 0, in.a.size(0), group_size);
    } else {
      check_divides(name, "b", 1, in.b.size(1), group_size);
    }
  }

  void sign(Signature& signature, const MatmulCall& in) const override {
    signature.dtype(in.a)
        .option("M", in.a.size(0))
        .option("N", in.b.size(1))
        .option("scatter_dim", in.dim)
        .own_tensor(in.a)
        .own_tensor(in.b)
        .device(in.a.device())
        .gradients({{"a", in.a}, {"b", in.b}});
  }

  bool is_empty(const MatmulCall& in) const override { return in.a.size(0) * in.b.size(1) == 0; }

  // To scatter columns, the kernels scatter the rows of the transposed product.
  FusedProduct product(at::IntArrayRef a, at::IntArrayRef b, int64_t dim,
                       int64_t /*group_size*/) const override {
    return dim == 0 ? FusedProduct{Form::kScatter, a[0], b[1], a[1]}
                    : FusedProduct{Form::kScatter, b[1], a[0], a[1]};
  }

  at::Tensor fused_on_cpu(const Group& group, const comm::CallSignature& call,
                          const MatmulCall& in) const override {
    return cpu::matmul_sum(group, call, in.a, in.b, in.dim);
  }

  at::Tensor fused_on_cuda(const Group& group, const MatmulCall& in) const override {
    return fused_matmul_sum(group, in.a, in.b, {.everywhere = false, .by_rows = in.dim == 0});
  }

  at::Tensor chunked(const Group& group, const MatmulCall& in) const override {
    return in.dim == 0 ? chunked_over_rows(group, in.a, in.b)
                       : chunked_over_columns(group, in.a, in.b);
  }

  at::Tensor sequential(const Group& group, const MatmulCall& in) const override {
    return c10d_reduce_scatter(group, at::mm(in.a, in.b), in.dim);
  }

 private:
  // Cuts every rank's rows into chunks.
  static at::Tensor chunked_over_rows(const Group& group, const at::Tensor& a,
                                      const at::Tensor& b) {
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

  // Cuts the rows into chunks, each with every rank's columns.
  static at::Tensor chunked_over_columns(const Group& group, const at::Tensor& a,
                                         const at::Tensor& b) {
    const int64_t rows = a.size(0), columns = b.size(1) / group.size;
    auto output = at::empty({rows, columns}, a.options());
    drain(
        plan_chunks(output, rows),
        [&](comm::Range r) {
          const auto product = at::mm(a.narrow(0, r.begin, r.size()), b);
          return start_reduce_scatter(
              group, product.view({r.size(), group.size, columns}).transpose(0, 1));
        },
        [&](comm::Range r) { return output.narrow(0, r.begin, r.size()); });
    return output;
  }
};

constexpr auto& matmul_reduce_scatter = run_along_dim<MatmulReduceScatter>;

}  // namespace

const MatmulOp& kMatmulReduceScatter = kInstance<MatmulReduceScatter>;

AXONN_REGISTER_OP(matmul_reduce_scatter)
AXONN_REGISTER_AUTOCAST(matmul_reduce_scatter, casts_operands)

}  // namespace axonn::ops
