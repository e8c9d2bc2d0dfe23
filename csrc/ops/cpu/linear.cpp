// A whole Linear of the 3D matmul, composed of the fused ops. Legend as in docs/architecture.md:
//   r  the axis that the input's rows (sharded) and the output's features are split over
//   s  the axis that the input's features are split over: the output is summed over it
//   z  the axis that holds the weight's rows in shards
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {
namespace {

struct Axis {
  const std::string& name;
  int64_t size;
};

struct Axes {
  Axis r, s, z;
  const std::string& algorithm;

  static Axes of(const char* op, const std::vector<std::string>& names, at::IntArrayRef sizes,
                 const std::string& algorithm) {
    TORCH_CHECK_VALUE(names.size() == 3 && sizes.size() == 3, op,
                      ": group_names and group_sizes must name the groups (r, s, z), got ",
                      names.size(), " names and ", sizes.size(), " sizes");
    return {{names[0], sizes[0]}, {names[1], sizes[1]}, {names[2], sizes[2]}, algorithm};
  }

  at::Tensor gather(const at::Tensor& t, const Axis& axis, int64_t dim) const {
    return axis.size == 1 ? t : all_gather(t, dim, axis.name, axis.size, algorithm);
  }
  // The product summed over an axis: a block of it on each rank, or all of it on every rank.
  at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const Axis& axis, bool scatter,
                    int64_t dim) const {
    return scatter ? matmul_reduce_scatter(a, b, dim, axis.name, axis.size, algorithm)
                   : matmul_all_reduce(a, b, axis.name, axis.size, algorithm);
  }
  // This rank's part of what is split over an axis and whole here.
  at::Tensor own_features(const at::Tensor& t, const Axis& axis) const {
    if (axis.size == 1) return t;
    const int64_t length = t.size(0) / axis.size;
    const auto group = resolve_group("linear_forward", axis.name, axis.size, "sequential");
    return t.narrow(0, group.rank * length, length);
  }
};

at::Tensor nothing(const at::Tensor& like) { return at::empty({0}, like.options()); }

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    std::vector<std::string> group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, bool save_input, bool save_weight,
    std::string algorithm) {
  constexpr auto kOp = "linear_forward";
  const auto axes = Axes::of(kOp, group_names, group_sizes, algorithm);
  check_algorithm(kOp, algorithm);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_dim(kOp, "scatter_dim", scatter_dim, 2);
  check_matmul(kOp, "x", x, "weight", weight);
  const bool gathers = sharded && axes.r.size > 1;
  const int64_t features = x.size(1) * (gathers && gather_dim == 1 ? axes.r.size : 1);
  check_inner(kOp, "features of x", features, "weight.size(1)", weight.size(1));

  const auto full_weight = axes.gather(weight, axes.z, 0);
  // The input is gathered on its own where it must be kept, or where the product is summed over s
  // as well; otherwise its rows feed the matmul from their owners' memory.
  const bool feed = gathers && !save_input && axes.s.size == 1;
  const auto full_x = gathers && !feed ? axes.gather(x, axes.r, gather_dim) : x;
  auto y =
      feed ? all_gather_matmul(x, full_weight.t(), gather_dim, axes.r.name, axes.r.size, algorithm)
           : axes.matmul(full_x, full_weight.t(), axes.s, sharded, scatter_dim);
  if (bias) {  // after the sum over s, so once
    y.add_(sharded && scatter_dim == 1 ? axes.own_features(*bias, axes.s) : *bias);
  }
  return {y, gathers && save_input ? full_x : nothing(x),
          axes.z.size > 1 && save_weight ? full_weight : nothing(weight)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, bool x_is_full,
    bool weight_is_full, std::array<bool, 3> output_mask, std::vector<std::string> group_names,
    at::IntArrayRef group_sizes, bool sharded, int64_t gather_dim, int64_t scatter_dim,
    std::string algorithm) {
  constexpr auto kOp = "linear_backward";
  const auto axes = Axes::of(kOp, group_names, group_sizes, algorithm);
  check_algorithm(kOp, algorithm);
  check_dim(kOp, "gather_dim", gather_dim, 2);
  check_dim(kOp, "scatter_dim", scatter_dim, 2);
  check_matmul(kOp, "dy", dy, "weight", weight);
  const auto full_dy = sharded ? axes.gather(dy, axes.s, scatter_dim) : dy;

  auto dx = nothing(dy), dweight = nothing(dy), dbias = nothing(dy);
  if (output_mask[0]) {
    const auto full_weight = weight_is_full ? weight : axes.gather(weight, axes.z, 0);
    dx = axes.matmul(full_dy, full_weight, axes.r, sharded, gather_dim);
  }
  if (output_mask[1]) {
    const auto full_x = sharded && !x_is_full ? axes.gather(x, axes.r, gather_dim) : x;
    dweight = axes.matmul(full_dy.t(), full_x, axes.z, /*scatter=*/true, 0);
  }
  if (output_mask[2]) {  // column sums of dY': the other axes are sync_gradients' task
    const auto accumulate = dy.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    dbias = at::sum(full_dy, 0, /*keepdim=*/false, accumulate).to(dy.scalar_type());
  }
  return {dx, dweight, dbias};
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) {
  m.impl("linear_forward", &linear_forward);
  m.impl("linear_backward", &linear_backward);
}

}  // namespace axonn::ops::cpu
