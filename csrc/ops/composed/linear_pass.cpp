#include "ops/composed/linear_pass.h"

#include <utility>

#include "ops/checks.h"
#include "ops/composed/fused_cuda.h"
#include "ops/composed/group_arguments.h"
#include "ops/composed/matmul_op.h"

namespace axonn::ops::linear {

LinearAxes resolve_axes(const char* op, const std::vector<std::string>& names,
                        at::IntArrayRef sizes, bool sharded, int64_t gather_dim,
                        int64_t scatter_dim, const std::string& algorithm, bool deterministic,
                        c10::Device device) {
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
  // All ranks resolve the groups in this order, because the first call of a group is collective.
  LinearAxes axes{.r = resolve(0),
                  .s = resolve(1),
                  .z = resolve(2),
                  .all = Group::alone(),
                  .sharded = sharded,
                  .gather_dim = gather_dim,
                  .scatter_dim = scatter_dim,
                  .asked = asked,
                  .deterministic = deterministic,
                  .device = device};
  if (names.size() == 4 && asked == kAuto) axes.all = resolve(3);
  return axes;
}

void check_scatter(const char* op, const char* what, std::array<int64_t, 2> sizes, int64_t dim,
                   int64_t group_size) {
  TORCH_CHECK_VALUE(sizes[dim] % group_size == 0, op, ": ", what, " has ", sizes[dim],
                    dim == 0 ? " rows" : " features",
                    ", which must be divisible by the group size ", group_size);
}

Signature signature_of(const char* op, const LinearAxes& axes) {
  auto signature = Signature(op)
                       .option("r", axes.r.size)
                       .option("s", axes.s.size)
                       .option("z", axes.z.size)
                       .option("sharded", axes.sharded)
                       .option("gather_dim", axes.gather_dim)
                       .option("scatter_dim", axes.scatter_dim);
  if (!axes.deterministic) signature.option("deterministic", 0);
  return signature;
}

std::string why_no_fused_linear(const LinearAxes& axes, const PassSizes& sizes) {
  using Form = FusedProduct::Form;
  const auto [dtype, m, k, n] = sizes;
  const auto gathered = axes.gather_dim == 0 ? Form::kRows : Form::kInnerA;
  // The products that are summed are y along s, dx along r and dweight along z.
  const auto sum = [&](int64_t rows, int64_t columns, int64_t inner, int64_t dim,
                       const Group& axis) {
    const std::array left{rows, inner}, right{inner, columns};
    const auto& op = axes.sharded ? kMatmulReduceScatter : kMatmulAllReduce;
    return op.product(left, right, dim, axis.size);
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

}  // namespace axonn::ops::linear
