// A whole Linear of the 3D matmul. Legend as in docs/architecture.md:
//   r  the axis that the input's rows (sharded) and the output's features are split over
//   s  the axis that the input's features are split over: the output is summed over it
//   z  the axis that holds the weight's rows in shards
//
// "fused" multiplies what peers hold in their memory and drains every product into the slots that
// peers read: one call per axis and pass, nothing is gathered into a copy unless it is to be kept.
// In which order calls are opened, shards published, waited for and sums signalled is mirrored in
// core/linear_program.cpp, whose programs the tests show to be free of deadlocks and races.
// "chunked" and "sequential", and "auto" where an axis spans hosts, are composed of the other ops.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "ops/checks.h"
#include "ops/cpu/fused.h"
#include "ops/cpu/ops.h"
#include "ops/tuner.h"

namespace axonn::ops::cpu {
namespace {

// What both passes are told of the axes and of how rows or features move along them.
struct Axes {
  Group r, s, z;
  Group all;  // the ranks of the three, who agree on an algorithm; alone if it was not named
  bool sharded;
  int64_t gather_dim;   // of x along r, and of dx
  int64_t scatter_dim;  // of y along s, and of dy
  std::string algorithm;

  Axes(const char* op, const std::vector<std::string>& names, at::IntArrayRef sizes,
       bool sharded_layout, int64_t gather, int64_t scatter, const std::string& algorithm_name)
      : sharded(sharded_layout),
        gather_dim(gather),
        scatter_dim(scatter),
        algorithm(algorithm_name) {
    check_algorithm(op, algorithm);
    TORCH_CHECK_VALUE(
        names.size() == sizes.size() && (names.size() == 3 || names.size() == 4), op,
        ": group_names and group_sizes must name the groups (r, s, z) or (r, s, z, all), got ",
        names.size(), " names and ", sizes.size(), " sizes");
    check_dim(op, "gather_dim", gather_dim, 2);
    check_dim(op, "scatter_dim", scatter_dim, 2);
    for (const int64_t size : sizes) check_group_size(op, size);
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < i; ++j) {
        TORCH_CHECK_VALUE(sizes[i] == 1 || sizes[j] == 1 || names[i] != names[j], op,
                          ": group_names must be three different groups, got '", names[i],
                          "' twice");
      }
    }
    r = resolve_group(op, names[0], sizes[0], algorithm);
    s = resolve_group(op, names[1], sizes[1], algorithm);
    z = resolve_group(op, names[2], sizes[2], algorithm);
    if (names.size() == 4 && algorithm == "auto")
      all = resolve_group(op, names[3], sizes[3], algorithm);
  }

  bool gathers() const { return sharded && r.size > 1; }
  Drain drain_over_s() const { return drain(scatter_dim); }
  Drain drain_over_r() const { return drain(gather_dim); }
  bool can_fuse() const { return fits(r) && fits(s) && fits(z); }
  bool alone() const { return r.size * s.size * z.size == 1; }
  // Runs a pass, fused or composed of ops of the given algorithm. "auto" is measured where the
  // ranks can agree on it; elsewhere it is "fused" or, where an axis spans hosts, "auto" of each
  // op.
  template <typename MakeSignature, typename Fused, typename Composed>
  auto run(bool is_empty, MakeSignature&& make_signature, Fused&& fused,
           Composed&& composed) const {
    if (alone() || (algorithm == "auto" && all.size == 1)) {
      return can_fuse() ? fused() : composed("auto");
    }
    // A rank needs its peers along the axes for its call to end, not theirs.
    const CallTraits traits{.can_fuse = can_fuse(), .is_empty = is_empty, .meets = false};
    return run_algorithm(all, algorithm, traits, make_signature, [&](Algorithm choice) {
      return choice == Algorithm::kFused ? fused() : composed(name_of(choice));
    });
  }
  Signature signature(const char* op) const {
    return Signature(op)
        .option("r", r.size)
        .option("s", s.size)
        .option("z", z.size)
        .option("sharded", sharded)
        .option("gather_dim", gather_dim)
        .option("scatter_dim", scatter_dim);
  }

  static void check_scatter(const char* op, const char* what, std::array<int64_t, 2> sizes,
                            int64_t dim, int64_t group_size) {
    TORCH_CHECK_VALUE(sizes[dim] % group_size == 0, op, ": ", what, " has ", sizes[dim],
                      dim == 0 ? " rows" : " features",
                      ", which must be divisible by the group size ", group_size);
  }

  // Composition of the other ops.
  at::Tensor gather(const at::Tensor& t, const Group& axis, int64_t dim,
                    const std::string& how) const {
    return axis.size == 1 ? t : all_gather(t, dim, axis.name, axis.size, how);
  }
  at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const Group& axis, bool scatter,
                    int64_t dim, const std::string& how) const {
    return scatter ? matmul_reduce_scatter(a, b, dim, axis.name, axis.size, how)
                   : matmul_all_reduce(a, b, axis.name, axis.size, how);
  }

 private:
  static bool fits(const Group& axis) { return axis.size == 1 || axis.can_fuse(); }
  Drain drain(int64_t dim) const {
    if (!sharded) return Drain::kAllReduce;
    return dim == 0 ? Drain::kScatterRows : Drain::kScatterColumns;
  }
};

at::Tensor nothing(const at::Tensor& like) { return at::empty({0}, like.options()); }

struct Forward {
  at::Tensor y, full_x, full_weight;
};

Forward fused_forward(const Axes& axes, const at::Tensor& x, const at::Tensor& weight,
                      bool save_input, bool save_weight) {
  const auto no_peers = Group::alone();
  const auto& r = axes.gathers() ? axes.r : no_peers;
  const int64_t rows = x.size(0) * (axes.gather_dim == 0 ? r.size : 1);
  const int64_t features = weight.size(0) * axes.z.size;
  const auto signature = comm::CallSignature::of(
      "linear_forward", {x.size(0), x.size(1), weight.size(0), weight.size(1), axes.sharded,
                         axes.gather_dim, axes.scatter_dim, static_cast<int64_t>(x.scalar_type())});

  FusedCall z_call(axes.z, signature, Gathered::bytes(axes.z, weight));
  Gathered gathered_weight(z_call, weight, 0);
  FusedCall r_call(r, signature, Gathered::bytes(r, x));
  Gathered gathered_x(r_call, x, axes.gather_dim);
  const auto how = axes.drain_over_s();
  FusedCall s_call(axes.s, signature, Drained::bytes(axes.s, rows, features, how, x.options()));
  Drained y(s_call, rows, features, how, x.options());

  multiply(y, {gathered_x}, {gathered_weight, /*transposed=*/true});
  return {y.finish(), save_input && r.size > 1 ? gathered_x.take() : nothing(x),
          save_weight && axes.z.size > 1 ? gathered_weight.take() : nothing(weight)};
}

Forward composed_forward(const Axes& axes, const at::Tensor& x, const at::Tensor& weight,
                         bool save_input, bool save_weight, const std::string& how) {
  // The weight is gathered on its own where it must be kept, or where something else is gathered or
  // summed as well; otherwise its rows feed the matmul.
  if (axes.z.size > 1 && !save_weight && !axes.gathers() && axes.s.size == 1) {
    return {matmul_all_gather_rhs(x, weight.t(), 1, axes.z.name, axes.z.size, how), nothing(x),
            nothing(weight)};
  }
  const auto full_weight = axes.gather(weight, axes.z, 0, how);
  // The input is gathered on its own where it must be kept, or where the product is summed over s
  // as well; otherwise its rows feed the matmul.
  const bool feed = axes.gathers() && !save_input && axes.s.size == 1;
  const auto full_x = axes.gathers() && !feed ? axes.gather(x, axes.r, axes.gather_dim, how) : x;
  auto y =
      feed ? all_gather_matmul(x, full_weight.t(), axes.gather_dim, axes.r.name, axes.r.size, how)
           : axes.matmul(full_x, full_weight.t(), axes.s, axes.sharded, axes.scatter_dim, how);
  return {y, axes.gathers() && save_input ? full_x : nothing(x),
          axes.z.size > 1 && save_weight ? full_weight : nothing(weight)};
}

// The gradient of a bias: column sums of dY'. The other axes are sync_gradients' task.
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

struct Backward {
  at::Tensor dx, dweight, dbias;
};

Backward fused_backward(const Axes& axes, const at::Tensor& dy, const at::Tensor& x,
                        const at::Tensor& weight, bool x_is_full, bool weight_is_full,
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
  const auto how = axes.drain_over_r();
  const auto signature = comm::CallSignature::of(
      "linear_backward",
      {dy.size(0), dy.size(1), in_features, axes.sharded, axes.gather_dim, axes.scatter_dim,
       (x_is_full << 4) + (weight_is_full << 3) + (mask[2] << 2) + (mask[1] << 1) + mask[0],
       static_cast<int64_t>(dy.scalar_type())});

  // Calls are opened and shards published before anything is waited for.
  FusedCall s_call(dy_axis, signature, Gathered::bytes(dy_axis, dy));
  Gathered gathered_dy(s_call, dy, axes.scatter_dim);
  FusedCall z_call(
      mask[1] ? dweight_axis : weight_axis, signature,
      Gathered::bytes(weight_axis, weight) +
          Drained::bytes(dweight_axis, features, in_features, Drain::kScatterRows, options));
  Gathered gathered_weight = Gathered::over(weight_axis, z_call, weight, 0);
  FusedCall r_call(
      mask[0] ? dx_axis : x_axis, signature,
      Gathered::bytes(x_axis, x) + Drained::bytes(dx_axis, rows, in_features, how, options));
  Gathered gathered_x = Gathered::over(x_axis, r_call, x, axes.gather_dim);

  // The sum of dx over r is made behind the product of dweight.
  std::optional<Drained> dx, dweight;
  if (mask[0]) {
    dx.emplace(r_call, rows, in_features, how, options);
    multiply(*dx, {gathered_dy}, {gathered_weight});
  }
  if (mask[1]) {
    dweight.emplace(z_call, features, in_features, Drain::kScatterRows, options);
    multiply(*dweight, {gathered_dy, /*transposed=*/true}, {gathered_x});
  }
  return {mask[0] ? dx->finish() : nothing(dy), mask[1] ? dweight->finish() : nothing(dy),
          mask[2] ? column_sums(gathered_dy) : nothing(dy)};
}

Backward composed_backward(const Axes& axes, const at::Tensor& dy, const at::Tensor& x,
                           const at::Tensor& weight, bool x_is_full, bool weight_is_full,
                           const std::array<bool, 3>& mask, const std::string& how) {
  const auto full_dy = axes.sharded ? axes.gather(dy, axes.s, axes.scatter_dim, how) : dy;
  Backward result{nothing(dy), nothing(dy), nothing(dy)};
  if (mask[0] && !weight_is_full && axes.z.size > 1 && axes.r.size == 1) {
    result.dx = matmul_all_gather_rhs(full_dy, weight, 0, axes.z.name, axes.z.size, how);
  } else if (mask[0]) {
    const auto full_weight = weight_is_full ? weight : axes.gather(weight, axes.z, 0, how);
    result.dx = axes.matmul(full_dy, full_weight, axes.r, axes.sharded, axes.gather_dim, how);
  }
  if (mask[1]) {
    const auto full_x =
        axes.sharded && !x_is_full ? axes.gather(x, axes.r, axes.gather_dim, how) : x;
    result.dweight = axes.matmul(full_dy.t(), full_x, axes.z, /*scatter=*/true, 0, how);
  }
  if (mask[2]) {
    Gathered whole(full_dy);
    result.dbias = column_sums(whole);
  }
  return result;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, bool save_input, bool save_weight,
    const std::string& algorithm) {
  constexpr auto kOp = "linear_forward";
  const Axes axes(kOp, group_names, group_sizes, sharded, gather_dim, scatter_dim, algorithm);
  check_matmul(kOp, "x", x, "weight", weight);
  const int64_t features = x.size(1) * (axes.gathers() && gather_dim == 1 ? axes.r.size : 1);
  check_inner(kOp, "features of x", features, "weight.size(1)", weight.size(1));
  if (bias) {
    const int64_t length = weight.size(0) * axes.z.size;
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == length, kOp, ": bias must have shape [",
                      length, "], got ", bias->sizes());
    TORCH_CHECK_TYPE(bias->scalar_type() == x.scalar_type(), kOp, ": bias has dtype ",
                     bias->scalar_type(), " but x has ", x.scalar_type());
  }
  if (sharded) {
    const int64_t rows = x.size(0) * (axes.gathers() && gather_dim == 0 ? axes.r.size : 1);
    axes.check_scatter(kOp, "the output", {rows, weight.size(0) * axes.z.size}, scatter_dim,
                       axes.s.size);
  }
  auto [y, full_x, full_weight] = axes.run(
      x.numel() == 0 || weight.numel() == 0,
      [&] {
        return axes.signature(kOp)
            .tensor("x", x)
            .tensor("weight", weight)
            .option("save_input", save_input)
            .option("save_weight", save_weight);
      },
      [&] { return fused_forward(axes, x, weight, save_input, save_weight); },
      [&](const std::string& how) {
        return composed_forward(axes, x, weight, save_input, save_weight, how);
      });
  if (bias) {  // after the sum over s, so once; a rank of s may have a part of the features only
    const int64_t own = y.size(1);
    y.add_(own == bias->size(0) ? *bias : bias->narrow(0, axes.s.rank * own, own));
  }
  return {y, full_x, full_weight};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, bool x_is_full,
    bool weight_is_full, std::array<bool, 3> output_mask,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, const std::string& algorithm) {
  constexpr auto kOp = "linear_backward";
  const Axes axes(kOp, group_names, group_sizes, sharded, gather_dim, scatter_dim, algorithm);
  check_matmul(kOp, "dy", dy, "weight", weight);
  const int64_t rows = dy.size(0) * (sharded && scatter_dim == 0 ? axes.s.size : 1);
  check_inner(kOp, "features of dy", dy.size(1) * (sharded && scatter_dim == 1 ? axes.s.size : 1),
              "rows of the weight", weight.size(0) * (weight_is_full ? 1 : axes.z.size));
  if (output_mask[1]) {
    const bool gathers = axes.gathers() && !x_is_full;
    check_matmul(kOp, "dy", dy, "x", x);
    check_inner(kOp, "rows of x", x.size(0) * (gathers && gather_dim == 0 ? axes.r.size : 1),
                "rows of dy", rows);
    check_inner(kOp, "features of x", x.size(1) * (gathers && gather_dim == 1 ? axes.r.size : 1),
                "weight.size(1)", weight.size(1));
  }
  if (sharded) {
    axes.check_scatter(kOp, "dx", {rows, weight.size(1)}, gather_dim, axes.r.size);
  }
  const auto [dx, dweight, dbias] = axes.run(
      dy.numel() == 0 || weight.numel() == 0 || !(output_mask[0] || output_mask[1]),
      [&] {
        return axes.signature(kOp)
            .tensor("dy", dy)
            .tensor("x", x)
            .tensor("weight", weight)
            .option("mask", output_mask[0] + 2 * output_mask[1] + 4 * output_mask[2]);
      },
      [&] { return fused_backward(axes, dy, x, weight, x_is_full, weight_is_full, output_mask); },
      [&](const std::string& how) {
        return composed_backward(axes, dy, x, weight, x_is_full, weight_is_full, output_mask, how);
      });
  return {dx, dweight, dbias};
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) {
  m.impl("linear_forward", &linear_forward);
  m.impl("linear_backward", &linear_backward);
}

}  // namespace axonn::ops::cpu
