// A Linear of the 3D matmul through shared memory: it multiplies peers' tensors in their memory,
// and drains every product into the slots that peers read. There is one call per axis and pass. A
// tensor is gathered into a copy only if it must be kept, or if product.cpp joins its parts first.
// core/symmetric/fused_order.h has the order of these steps.
#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>

#include <optional>

#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"
#include "ops/linear_axes.h"

namespace axonn::ops::cpu {
namespace {

Drain drain_of(const LinearAxes& axes, int64_t dim) {
  if (!axes.sharded) return Drain::kAllReduce;
  return dim == 0 ? Drain::kScatterRows : Drain::kScatterColumns;
}

// The gradient of a bias: column sums of the gathered dY. sync_gradients sums it over other axes.
at::Tensor column_sums(Gathered& dy) {
  const auto type = dy.part(0).scalar_type();
  const auto accumulate = type == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> sums;
  for (int64_t part = 0; part < dy.num_parts(); ++part) {
    sums.push_back(at::sum(dy.part(part), 0, /*keepdim=*/false, accumulate));
    if (dy.dim() == 0 && part > 0) sums[0].add_(sums[part]);
  }
  return (dy.dim() == 0 ? sums[0] : at::cat(sums)).to(type);
}

using Results = std::array<at::Tensor, 3>;

struct Pass {
  const comm::CallSignature& signature;
  const at::Tensor& nothing_like;

  FusedCall open(const Need& need) const { return {need.group, signature, need.bytes}; }
  at::Tensor nothing() const { return ops::nothing(nothing_like); }
  static void multiply(int /*product*/, Drained& out, Factor a, Factor b) {
    cpu::multiply(out, a, b);
  }
};

struct Forward : Pass {
  using Results = cpu::Results;

  const LinearAxes& axes;
  const at::Tensor& input;
  const at::Tensor& shard;
  int64_t rows;
  int64_t features;
  Drain drain;
  Need z, r, s;
  bool keeps_x;
  bool keeps_weight;

  Gathered gather_weight(FusedCall& call) const { return {call, shard, 0}; }
  Gathered gather_x(FusedCall& call) const { return {call, input, axes.gather_dim}; }
  Drained sum_y(FusedCall& call) const { return {call, rows, features, drain, input.options()}; }
};

struct Backward : Pass {
  using Results = cpu::Results;

  const LinearAxes& axes;
  const comm::BackwardGroups<const Group>& groups;
  const std::array<bool, 3>& mask;
  const at::Tensor& gradient;
  const at::Tensor& input;
  const at::Tensor& shard;
  int64_t rows;
  int64_t features;
  Drain drain;
  Need s, z, r;

  Gathered gather_dy(FusedCall& call) const { return {call, gradient, axes.scatter_dim}; }
  Gathered gather_weight(FusedCall& call) const {
    return Gathered::over(groups.weight, call, shard, 0);
  }
  Gathered gather_x(FusedCall& call) const {
    return Gathered::over(groups.x, call, input, axes.gather_dim);
  }
  Drained sum_dx(FusedCall& call) const {
    return {call, rows, shard.size(1), drain, gradient.options()};
  }
  Drained sum_dweight(FusedCall& call) const {
    return {call, features, shard.size(1), Drain::kScatterRows, gradient.options()};
  }
  static at::Tensor column_sums(Gathered& dy) { return cpu::column_sums(dy); }
};

}  // namespace

LinearOutput linear_forward(const LinearAxes& axes, const comm::CallSignature& signature,
                            const at::Tensor& x, const at::Tensor& weight, bool save_input,
                            bool save_weight) {
  const auto no_peers = Group::alone();
  const auto& x_axis = axes.gathers() ? axes.r : no_peers;
  const int64_t rows = x.size(0) * (axes.gather_dim == 0 ? x_axis.size : 1);
  const int64_t features = weight.size(0) * axes.z.size;

  const auto drain = drain_of(axes, axes.scatter_dim);
  const Need z{axes.z, Gathered::bytes(axes.z, weight)};
  const Need r{x_axis, Gathered::bytes(x_axis, x)};
  const Need s{axes.s, Drained::bytes(axes.s, rows, features, drain, x.options())};
  check_memory(signature, {z, r, s});

  Forward pass{{signature, x},
               axes,
               x,
               weight,
               rows,
               features,
               drain,
               z,
               r,
               s,
               save_input && x_axis.size > 1,
               save_weight && axes.z.size > 1};
  auto [y, full_x, full_weight] = comm::forward_in_order(pass);
  return {std::move(y), std::move(full_x), std::move(full_weight)};
}

LinearGradients linear_backward(const LinearAxes& axes, const comm::CallSignature& signature,
                                const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                bool x_is_full, bool weight_is_full,
                                const std::array<bool, 3>& mask) {
  const auto no_peers = Group::alone();
  const comm::BackwardGroups<const Group> groups(axes.r, axes.s, axes.z, no_peers, axes.sharded,
                                                 mask, x_is_full, weight_is_full);
  const auto options = dy.options();
  const int64_t rows = dy.size(0) * (axes.scatter_dim == 0 ? groups.dy.size : 1);
  const int64_t features = dy.size(1) * (axes.scatter_dim == 1 ? groups.dy.size : 1);
  const int64_t in_features = weight.size(1);
  const auto drain = drain_of(axes, axes.gather_dim);

  const Need s{groups.dy, Gathered::bytes(groups.dy, dy)};
  const Need z{groups.z, Gathered::bytes(groups.weight, weight) +
                             Drained::bytes(groups.dweight, features, in_features,
                                            Drain::kScatterRows, options)};
  const Need r{groups.r, Gathered::bytes(groups.x, x) +
                             Drained::bytes(groups.dx, rows, in_features, drain, options)};
  check_memory(signature, {s, z, r});

  Backward pass{{signature, dy}, axes, groups, mask, dy, x, weight, rows, features, drain, s, z, r};
  auto [dx, dweight, dbias] = comm::backward_in_order(pass);
  return {std::move(dx), std::move(dweight), std::move(dbias)};
}

}  // namespace axonn::ops::cpu
