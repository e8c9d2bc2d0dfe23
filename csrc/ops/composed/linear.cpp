// A whole Linear of the 3D matmul; legend in linear_axes.h. "fused" is the CPU backend's; the
// others, and "auto" where an axis shares no memory, are composed of the other ops. So is "fused"
// on CUDA: what feeds a matmul or drains it is fused with it, and what is gathered on its own is
// c10d's.
#include <ATen/ops/sum.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "ops/checks.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/checked_ops.h"
#include "ops/composed/fused_cuda.h"
#include "ops/composed/group_arguments.h"
#include "ops/composed/ops.h"
#include "ops/fused_cpu.h"
#include "ops/group/agreement.h"
#include "ops/linear_axes.h"
#include "ops/tuning/product.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {

namespace {

// Checks what it is given; `op` opens the messages.
LinearAxes resolve_axes(const char* op, const std::vector<std::string>& names,
                        at::IntArrayRef sizes, bool sharded, int64_t gather_dim,
                        int64_t scatter_dim, const std::string& algorithm, c10::Device device) {
  const auto asked = parse_algorithm(op, algorithm, device, /*fused_on_cuda=*/true);
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
                        ": group_names must be three different groups, got '", names[i], "' twice");
    }
  }
  const auto resolve = [&](size_t i) {
    return resolve_group(op, names[i], sizes[i], asked, device);
  };
  // In this order on all ranks: the first call of a group is collective.
  LinearAxes axes{.r = resolve(0),
                  .s = resolve(1),
                  .z = resolve(2),
                  .all = Group::alone(),
                  .sharded = sharded,
                  .gather_dim = gather_dim,
                  .scatter_dim = scatter_dim,
                  .asked = asked,
                  .device = device};
  if (names.size() == 4 && asked == kAuto) axes.all = resolve(3);
  return axes;
}

// Of the whole tensors that a rank multiplies.
struct PassSizes {
  at::ScalarType dtype;
  int64_t rows, in_features, out_features;
};

// Why a GPU's "fused" cannot make one of the passes; empty: it can. Whichever products the flags of
// a call leave out, those of all are asked for.
std::string why_no_fused_linear(const LinearAxes& axes, const PassSizes& sizes) {
  using Form = FusedProduct::Form;
  const auto [dtype, m, k, n] = sizes;
  const auto gathered = axes.gather_dim == 0 ? Form::kRows : Form::kInnerA;
  // What is summed: y along s, dx along r, dweight along z.
  const auto sum = [&](int64_t rows, int64_t columns, int64_t inner, int64_t dim,
                       const Group& axis) {
    const std::array left{rows, inner}, right{inner, columns};
    return axes.sharded ? reduce_scatter_product(left, right, dim)
                        : all_reduce_product(left, right, axis.size);
  };
  const std::array products{
      std::pair{&axes.r, FusedProduct{gathered, m, n, k}},
      std::pair{&axes.s, sum(m, n, k, axes.scatter_dim, axes.s)},
      std::pair{&axes.r, sum(m, k, n, axes.gather_dim, axes.r)},
      std::pair{&axes.z, FusedProduct{Form::kColumns, m, n, k}},
      std::pair{&axes.z, FusedProduct{Form::kInner, m, k, n}},
      std::pair{&axes.z, FusedProduct{Form::kScatter, n, k, m}},
  };
  for (const auto& [axis, product] : products) {
    if (axis->size == 1) continue;
    auto why = why_no_fused(axes.device, dtype, product, axis->size);
    if (!why.empty()) return why;
  }
  return "";
}

// Runs a pass, fused or composed of ops of the given algorithm, once the ranks of `used`, the axes
// that it moves something along, agree on it. "auto" is measured where the ranks can agree on it;
// elsewhere it is "fused" or, where an axis shares no memory, "auto" of each op.
template <typename Fused, typename Composed>
auto choose_and_run(const LinearAxes& axes, std::initializer_list<Group*> used,
                    const PassSizes& sizes, bool is_empty, const Signature& signature,
                    Fused&& fused, Composed&& composed) {
  if (axes.alone() || (axes.asked == kAuto && axes.all.size == 1)) {
    const auto call = signature.call(axes.can_fuse() ? "fused" : "auto");
    if (axes.can_fuse()) return fused(call);
    // Each op then agrees on its own, too.
    agreed(call, axes.device, used, [] { return true; });
    return composed(kAuto);
  }
  // A rank needs its peers along the axes for its call to end, not theirs.
  const auto why_not = [&] { return why_no_fused_linear(axes, sizes); };
  const CallTraits traits{.device = axes.device,
                          .can_fuse = axes.can_fuse(),
                          .is_empty = is_empty,
                          .meets = false,
                          .why_no_fused = why_not,
                          .largest_group = std::max({axes.r.size, axes.s.size, axes.z.size})};
  return run_algorithm(axes.all, axes.asked, traits, signature, [&](Algorithm choice) {
    const auto call = signature.call(name_of(choice));
    if (choice == Algorithm::kFused && axes.device.is_cpu()) return fused(call);
    return agreed(call, axes.device, used, [&] { return composed(choice); });
  });
}

// What goes wrong among the ranks of one axis ends the call on all of them; see abandon().
template <typename... Rest>
auto run(const LinearAxes& axes, std::initializer_list<Group*> used, const PassSizes& sizes,
         Rest&&... rest) {
  return with_shared_fate(used, [&] { return choose_and_run(axes, used, sizes, rest...); });
}

Signature signature_of(const char* op, const LinearAxes& axes) {
  return Signature(op)
      .option("r", axes.r.size)
      .option("s", axes.s.size)
      .option("z", axes.z.size)
      .option("sharded", axes.sharded)
      .option("gather_dim", axes.gather_dim)
      .option("scatter_dim", axes.scatter_dim);
}

void check_scatter(const char* op, const char* what, std::array<int64_t, 2> sizes, int64_t dim,
                   int64_t group_size) {
  TORCH_CHECK_VALUE(sizes[dim] % group_size == 0, op, ": ", what, " has ", sizes[dim],
                    dim == 0 ? " rows" : " features",
                    ", which must be divisible by the group size ", group_size);
}

// After the sum over s, so once; a rank of s may have a part of the features only.
void add_bias(const LinearAxes& axes, at::Tensor y, const std::optional<at::Tensor>& bias) {
  if (!bias) return;
  const int64_t own = y.size(1);
  y.add_(own == bias->size(0) ? *bias : bias->narrow(0, axes.s.rank * own, own));
}

at::Tensor gather(const at::Tensor& t, Group& axis, int64_t dim, AskedAlgorithm how) {
  if (axis.size == 1) return t;
  if (how == kAuto) return all_gather_in(axis, t, dim);
  return c10d_all_gather(axis, t, dim);
}

// "auto" stands for the fastest way to compute a whole product, too, where the ranks can agree on
// it. An algorithm that is named has the library's product: its bits depend on nothing measured.
ProductChoice products_of(const LinearAxes& axes, const char* name) {
  if (axes.asked != kAuto) return {nullptr, name};
  if (axes.alone()) return {&axes.r, name};  // each rank for itself: none computes what others do
  return {axes.all.size > 1 ? &axes.all : nullptr, name};
}

at::Tensor multiply(const ProductChoice& products, const at::Tensor& a, const at::Tensor& b,
                    Group& axis, bool scatter, int64_t dim, AskedAlgorithm how) {
  if (axis.size == 1) return products.mm(a, b);
  if (how == Algorithm::kSequential) {
    const auto product = products.mm(a, b);
    return scatter ? c10d_reduce_scatter(axis, product, dim)
                   : c10d_all_reduce(axis, product, /*maximum=*/false);
  }
  if (how == kAuto) {
    return scatter ? matmul_reduce_scatter_in(axis, a, b, dim, how)
                   : matmul_all_reduce_in(axis, a, b, how);
  }
  return scatter ? matmul_reduce_scatter_by(axis, a, b, dim, *how)
                 : matmul_all_reduce_by(axis, a, b, *how);
}

// A product with what is gathered along z.
at::Tensor feed_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t dim, Group& axis,
                    AskedAlgorithm how) {
  if (how == kAuto) return matmul_all_gather_rhs_in(axis, a, b_shard, dim, how);
  return matmul_all_gather_rhs_by(axis, a, b_shard, dim, *how);
}

at::Tensor feed_lhs(const at::Tensor& a_shard, const at::Tensor& b, int64_t dim, Group& axis,
                    AskedAlgorithm how) {
  if (how == kAuto) return all_gather_matmul_in(axis, a_shard, b, dim, how);
  return all_gather_matmul_by(axis, a_shard, b, dim, *how);
}

LinearOutput composed_forward(LinearAxes& axes, const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, bool save_input,
                              bool save_weight, AskedAlgorithm how) {
  const auto products = products_of(axes, "mm_forward");
  // One after the other: the gather, then a whole product.
  const bool apart = how == Algorithm::kSequential;
  // The weight is gathered on its own where it must be kept, or where something else is gathered or
  // summed as well; otherwise its rows feed the matmul.
  if (!apart && axes.z.size > 1 && !save_weight && !axes.gathers() && axes.s.size == 1) {
    const auto y = feed_rhs(x, weight.t(), 1, axes.z, how);
    add_bias(axes, y, bias);
    return {y, nothing(x), nothing(weight)};
  }
  const auto full_weight = gather(weight, axes.z, 0, how);
  // The input is gathered on its own where it must be kept, or where the product is summed over s
  // as well; otherwise its rows feed the matmul.
  const bool feed = !apart && axes.gathers() && !save_input && axes.s.size == 1;
  const auto full_x = axes.gathers() && !feed ? gather(x, axes.r, axes.gather_dim, how) : x;
  at::Tensor y;
  if (bias && !feed && axes.s.size == 1 && !axes.device.is_cpu()) {
    y = products.mm(full_x, full_weight.t(), bias);  // a GPU's matmul adds it on the way out
  } else {
    y = feed ? feed_lhs(x, full_weight.t(), axes.gather_dim, axes.r, how)
             : multiply(products, full_x, full_weight.t(), axes.s, axes.sharded, axes.scatter_dim,
                        how);
    add_bias(axes, y, bias);
  }
  return {y, axes.gathers() && save_input ? full_x : nothing(x),
          axes.z.size > 1 && save_weight ? full_weight : nothing(weight)};
}

struct BackwardInput {
  at::Tensor dy, x, weight;
  bool x_is_full, weight_is_full;
  std::array<bool, 3> mask;
};

// The gradient of a bias: column sums of dY'. The other axes are sync_gradients' task.
at::Tensor column_sums(const at::Tensor& dy) {
  // A GPU's sum of a low precision is made in fp32 and rounded once, in one pass.
  if (!dy.is_cpu() || dy.scalar_type() == at::kDouble) return at::sum(dy, 0);
  return at::sum(dy, 0, /*keepdim=*/false, at::kFloat).to(dy.scalar_type());
}

// A tensor that is whole already, or on its way.
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

// "chunked" where dgrad has a sum over r and wgrad follows: that sum is made behind the wgrad
// matmul (AxoNN's OAR), and x is gathered behind the dgrad matmul.
LinearGradients overlapped_backward(LinearAxes& axes, const BackwardInput& in) {
  const auto no_peers = Group::alone();
  // Every rank starts in this order; what is needed first comes first.
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
  const auto dbias = in.mask[2] ? column_sums(full_dy) : nothing(in.dy);
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
                         axes.gather_dim, how);
  }
  if (in.mask[1]) {
    const auto full_x =
        axes.sharded && !in.x_is_full ? gather(in.x, axes.r, axes.gather_dim, how) : in.x;
    result.dweight = multiply(products_of(axes, "mm_wgrad"), full_dy.t(), full_x, axes.z,
                              /*scatter=*/true, 0, how);
  }
  if (in.mask[2]) result.dbias = column_sums(full_dy);
  return result;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, bool save_input, bool save_weight,
    const std::string& algorithm) {
  constexpr auto kOp = "linear_forward";
  auto axes = resolve_axes(kOp, group_names, group_sizes, sharded, gather_dim, scatter_dim,
                           algorithm, x.device());
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
    check_scatter(kOp, "the output", {rows, weight.size(0) * axes.z.size}, scatter_dim,
                  axes.s.size);
  }
  auto signature = signature_of(kOp, axes);
  signature.tensor("x", x)
      .tensor("weight", weight)
      .option("save_input", save_input)
      .option("save_weight", save_weight)
      .device(axes.device)
      .gradients({{"x", x}, {"weight", weight}});
  if (bias) signature.gradients({{"bias", *bias}});
  auto nobody = Group::alone();
  const auto [y, full_x, full_weight] = run(
      axes, {&axes.z, axes.gathers() ? &axes.r : &nobody, &axes.s},
      {x.scalar_type(), x.size(0) * (axes.gathers() && gather_dim == 0 ? axes.r.size : 1), features,
       weight.size(0) * axes.z.size},
      x.numel() == 0 || weight.numel() == 0, signature,
      [&](const comm::CallSignature& call) {
        auto output = cpu::linear_forward(axes, call, x, weight, save_input, save_weight);
        add_bias(axes, output.y, bias);
        return output;
      },
      [&](AskedAlgorithm how) {
        return composed_forward(axes, x, weight, bias, save_input, save_weight, how);
      });
  return {y, full_x, full_weight};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, bool x_is_full,
    bool weight_is_full, std::array<bool, 3> output_mask,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, const std::string& algorithm) {
  constexpr auto kOp = "linear_backward";
  auto axes = resolve_axes(kOp, group_names, group_sizes, sharded, gather_dim, scatter_dim,
                           algorithm, dy.device());
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
    check_scatter(kOp, "dx", {rows, weight.size(1)}, gather_dim, axes.r.size);
  }
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
      {dy.scalar_type(), rows, weight.size(1), weight.size(0) * (weight_is_full ? 1 : axes.z.size)},
      dy.numel() == 0 || weight.numel() == 0 || !(output_mask[0] || output_mask[1]), signature,
      [&](const comm::CallSignature& call) {
        return cpu::linear_backward(axes, call, dy, x, weight, x_is_full, weight_is_full,
                                    output_mask);
      },
      [&](AskedAlgorithm how) {
        return composed_backward(axes, {dy, x, weight, x_is_full, weight_is_full, output_mask},
                                 how);
      });
  return {dx, dweight, dbias};
}

}  // namespace axonn::ops
