// A Linear of the 3D matmul through shared memory: it multiplies what peers hold in their memory,
// and drains every product into the slots that peers read. There is one call per axis and pass, and
// nothing is gathered into a copy unless it is to be kept. model/linear_program.cpp repeats the
// order in which calls are opened, shards published and waited for, and sums signalled; the tests
// show that its programs are free of deadlocks and races.
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

// The gradient of a bias: column sums of dY'. sync_gradients adds it up over the other axes.
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

}  // namespace

LinearOutput linear_forward(const LinearAxes& axes, const comm::CallSignature& signature,
                            const at::Tensor& x, const at::Tensor& weight, bool save_input,
                            bool save_weight) {
  const auto no_peers = Group::alone();
  const auto& x_axis = axes.gathers() ? axes.r : no_peers;
  const int64_t rows = x.size(0) * (axes.gather_dim == 0 ? x_axis.size : 1);
  const int64_t features = weight.size(0) * axes.z.size;

  const auto how = drain_of(axes, axes.scatter_dim);
  const Need z{axes.z, Gathered::bytes(axes.z, weight)};
  const Need r{x_axis, Gathered::bytes(x_axis, x)};
  const Need s{axes.s, Drained::bytes(axes.s, rows, features, how, x.options())};
  check_memory(signature, {z, r, s});

  FusedCall z_call(z.group, signature, z.bytes);
  Gathered gathered_weight(z_call, weight, 0);
  FusedCall r_call(r.group, signature, r.bytes);
  Gathered gathered_x(r_call, x, axes.gather_dim);
  FusedCall s_call(s.group, signature, s.bytes);
  Drained y(s_call, rows, features, how, x.options());

  multiply(y, {gathered_x}, {gathered_weight, /*transposed=*/true});
  for (auto* call : {&z_call, &r_call}) call->compare();
  return {y.finish(), save_input && x_axis.size > 1 ? gathered_x.take() : nothing(x),
          save_weight && axes.z.size > 1 ? gathered_weight.take() : nothing(weight)};
}

LinearGradients linear_backward(const LinearAxes& axes, const comm::CallSignature& signature,
                                const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                bool x_is_full, bool weight_is_full,
                                const std::array<bool, 3>& mask) {
  const auto no_peers = Group::alone();
  const auto& x_axis = mask[1] && axes.sharded && !x_is_full ? axes.r : no_peers;
  const auto& dx_axis = mask[0] ? axes.r : no_peers;
  const auto& weight_axis = mask[0] && !weight_is_full ? axes.z : no_peers;
  const auto& dweight_axis = mask[1] ? axes.z : no_peers;
  const auto& dy_axis = axes.sharded ? axes.s : no_peers;

  const auto options = dy.options();
  const int64_t rows = dy.size(0) * (axes.scatter_dim == 0 ? dy_axis.size : 1);
  const int64_t features = dy.size(1) * (axes.scatter_dim == 1 ? dy_axis.size : 1);
  const int64_t in_features = weight.size(1);
  const auto how = drain_of(axes, axes.gather_dim);

  const Need s{dy_axis, Gathered::bytes(dy_axis, dy)};
  const Need z{
      mask[1] ? dweight_axis : weight_axis,
      Gathered::bytes(weight_axis, weight) +
          Drained::bytes(dweight_axis, features, in_features, Drain::kScatterRows, options)};
  const Need r{
      mask[0] ? dx_axis : x_axis,
      Gathered::bytes(x_axis, x) + Drained::bytes(dx_axis, rows, in_features, how, options)};
  check_memory(signature, {s, z, r});

  // Calls are opened and shards published before this rank waits for anything.
  FusedCall s_call(s.group, signature, s.bytes);
  Gathered gathered_dy(s_call, dy, axes.scatter_dim);
  FusedCall z_call(z.group, signature, z.bytes);
  Gathered gathered_weight = Gathered::over(weight_axis, z_call, weight, 0);
  FusedCall r_call(r.group, signature, r.bytes);
  Gathered gathered_x = Gathered::over(x_axis, r_call, x, axes.gather_dim);

  // The sum of dx over r is made after the product of dweight.
  std::optional<Drained> dx, dweight;
  if (mask[0]) {
    dx.emplace(r_call, rows, in_features, how, options);
    multiply(*dx, {gathered_dy}, {gathered_weight});
  }
  if (mask[1]) {
    dweight.emplace(z_call, features, in_features, Drain::kScatterRows, options);
    multiply(*dweight, {gathered_dy, /*transposed=*/true}, {gathered_x});
  }
  for (auto* call : {&s_call, &z_call, &r_call}) call->compare();
  return {mask[0] ? dx->finish() : nothing(dy), mask[1] ? dweight->finish() : nothing(dy),
          mask[2] ? column_sums(gathered_dy) : nothing(dy)};
}

}  // namespace axonn::ops::cpu
