// The gradients of a Linear of the 3D matmul.
#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/checks.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/linear_pass.h"
#include "ops/composed/linear_products.h"
#include "ops/composed/register.h"
#include "ops/fused_cpu.h"

namespace axonn::ops {
namespace {

using namespace linear;

constexpr auto kOp = "linear_backward";

struct BackwardInput {
  at::Tensor dy, x, weight;
  bool x_is_full, weight_is_full;
  std::array<bool, 3> mask;
};

// A tensor that is whole already, or is still being gathered.
class Gathering {
 public:
  Gathering(const at::Tensor& shard, const Group& axis, int64_t dim) : whole_(shard), dim_(dim) {
    if (axis.size > 1) pending_ = start_all_gather(axis, shard);
  }
  at::Tensor wait() {
    if (pending_) {
      pending_->wait();
      whole_ = joined(pending_->output, dim_);
      pending_.reset();
    }
    return whole_;
  }

 private:
  at::Tensor whole_;
  std::optional<Pending> pending_;
  int64_t dim_;
};

// Runs "chunked" if dgrad has a sum over r and wgrad follows: the sum runs during the wgrad product
// (AxoNN's OAR), and x is gathered during the dgrad product.
LinearGradients overlapped_backward(LinearAxes& axes, const BackwardInput& in) {
  const auto no_peers = Group::alone();
  // All ranks start the gathers in this order: the tensor that is needed first comes first.
  Gathering dy(in.dy, axes.sharded ? axes.s : no_peers, axes.scatter_dim);
  Gathering weight(in.weight, in.weight_is_full ? no_peers : axes.z, 0);
  Gathering x(in.x, axes.sharded && !in.x_is_full ? axes.r : no_peers, axes.gather_dim);

  const auto full_dy = dy.wait();
  const auto product = products_of(axes, "mm_dgrad").mm(full_dy, weight.wait());
  const auto dx = axes.sharded
                      ? start_reduce_scatter(axes.r, stacked(product, axes.gather_dim, axes.r.size))
                      : start_all_reduce(axes.r, product);
  const auto dweight = multiply(products_of(axes, "mm_wgrad"), full_dy.t(), x.wait(), axes.z,
                                /*scatter=*/true, 0, Algorithm::kChunked);
  // at::sum accumulates the bias gradient of a low-precision dtype in fp32 and rounds it once.
  // sync_gradients sums it over the other axes.
  const auto dbias = in.mask[2] ? at::sum(full_dy, 0) : nothing(in.dy);
  dx.wait();
  return {dx.output.to(in.dy.scalar_type()), dweight, dbias};
}

LinearGradients composed_backward(LinearAxes& axes, const BackwardInput& in, AskedAlgorithm how) {
  if (how == Algorithm::kChunked && axes.r.size > 1 && in.mask[0] && in.mask[1]) {
    return overlapped_backward(axes, in);
  }
  const auto full_dy = axes.sharded ? gather(in.dy, axes.s, axes.scatter_dim, how) : in.dy;
  LinearGradients result{nothing(in.dy), nothing(in.dy), nothing(in.dy)};
  const bool apart = how == Algorithm::kSequential;
  if (in.mask[0] && !apart && !in.weight_is_full && axes.z.size > 1 && axes.r.size == 1) {
    result.dx = feed_rhs(full_dy, in.weight, 0, axes.z, how);
  } else if (in.mask[0]) {
    const auto full_weight = in.weight_is_full ? in.weight : gather(in.weight, axes.z, 0, how);
    result.dx = multiply(products_of(axes, "mm_dgrad"), full_dy, full_weight, axes.r, axes.sharded,
                         axes.gather_dim, how, axes.deterministic);
  }
  if (in.mask[1]) {
    const auto full_x =
        axes.sharded && !in.x_is_full ? gather(in.x, axes.r, axes.gather_dim, how) : in.x;
    result.dweight = multiply(products_of(axes, "mm_wgrad"), full_dy.t(), full_x, axes.z,
                              /*scatter=*/true, 0, how);
  }
  if (in.mask[2]) result.dbias = at::sum(full_dy, 0);
  return result;
}

// Returns the sizes of the whole tensors. Raises for operands that do not fit.
PassSizes check_operands(const LinearAxes& axes, const BackwardInput& in) {
  const auto& [dy, x, weight, x_is_full, weight_is_full, mask] = in;
  check_matmul(kOp, "dy", dy, "weight", weight);
  const int64_t rows = dy.size(0) * (axes.sharded && axes.scatter_dim == 0 ? axes.s.size : 1);
  const int64_t features = dy.size(1) * (axes.sharded && axes.scatter_dim == 1 ? axes.s.size : 1);
  const int64_t out_features = weight.size(0) * (weight_is_full ? 1 : axes.z.size);
  check_inner(kOp, "features of dy", features, "rows of the weight", out_features);
  if (mask[1]) {
    const bool gathers = axes.gathers() && !x_is_full;
    check_matmul(kOp, "dy", dy, "x", x);
    check_inner(kOp, "rows of x", x.size(0) * (gathers && axes.gather_dim == 0 ? axes.r.size : 1),
                "rows of dy", rows);
    check_inner(kOp, "features of x",
                x.size(1) * (gathers && axes.gather_dim == 1 ? axes.r.size : 1), "weight.size(1)",
                weight.size(1));
  }
  if (axes.sharded) {
    check_scatter(kOp, "dx", {rows, weight.size(1)}, axes.gather_dim, axes.r.size);
  }
  return {dy.scalar_type(), rows, weight.size(1), out_features};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, bool x_is_full,
    bool weight_is_full, std::array<bool, 3> output_mask,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, const std::string& algorithm, bool deterministic) {
  auto axes = resolve_axes(kOp, group_names, group_sizes, sharded, gather_dim, scatter_dim,
                           algorithm, deterministic, dy.device());
  const BackwardInput in{dy, x, weight, x_is_full, weight_is_full, output_mask};
  const auto sizes = check_operands(axes, in);
  auto signature = signature_of(kOp, axes);
  signature.tensor("dy", dy)
      .tensor("x", x)
      .tensor("weight", weight)
      .option("mask", output_mask[0] + 2 * output_mask[1] + 4 * output_mask[2])
      .device(axes.device);
  auto nobody = Group::alone();
  const bool moves_x = output_mask[1] && sharded && !x_is_full;
  const bool moves_weight = output_mask[0] && !weight_is_full;
  const auto [dx, dweight, dbias] = run(
      axes,
      {sharded ? &axes.s : &nobody, output_mask[1] || moves_weight ? &axes.z : &nobody,
       output_mask[0] || moves_x ? &axes.r : &nobody},
      sizes, dy.numel() == 0 || weight.numel() == 0 || !(output_mask[0] || output_mask[1]),
      signature,
      [&](const comm::CallSignature& call) {
        return cpu::linear_backward(axes, call, dy, x, weight, x_is_full, weight_is_full,
                                    output_mask);
      },
      [&](AskedAlgorithm how) { return composed_backward(axes, in, how); });
  return {dx, dweight, dbias};
}

}  // namespace

AXONN_REGISTER_OP(linear_backward)
AXONN_REGISTER_AUTOCAST(linear_backward, leaves_operands)

}  // namespace axonn::ops
