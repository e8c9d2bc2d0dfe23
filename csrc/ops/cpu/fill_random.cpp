#include <torch/library.h>

#include "core/philox.h"
#include "ops/checks.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "fill_random_";

kernels::Distribution distribution_of(const std::string& name) {
  TORCH_CHECK_VALUE(name == "normal" || name == "uniform", kOp,
                    ": distribution must be 'normal' or 'uniform', got '", name, "'");
  return name == "normal" ? kernels::Distribution::kNormal : kernels::Distribution::kUniform;
}

}  // namespace

void fill_random_(const at::Tensor& out, at::IntArrayRef full_sizes, at::IntArrayRef offsets,
                  const std::string& name, int64_t seed, const std::string& distribution, double a,
                  double b) {
  const auto num_dims = static_cast<size_t>(out.dim());
  check_reducible(kOp, "out", out);
  TORCH_CHECK_VALUE(out.is_contiguous(), kOp, ": out must be contiguous");
  TORCH_CHECK_VALUE(num_dims > 0 && full_sizes.size() == num_dims && offsets.size() == num_dims,
                    kOp, ": out of shape ", out.sizes(), " needs a size and an offset a dim, got ",
                    full_sizes, " and ", offsets);
  for (size_t d = 0; d < num_dims; ++d) {
    TORCH_CHECK_VALUE(offsets[d] >= 0 && offsets[d] + out.size(d) <= full_sizes[d], kOp,
                      ": block [", offsets[d], ", ", offsets[d] + out.size(d), ") of dim ", d,
                      " does not lie in [0, ", full_sizes[d], ")");
  }
  const kernels::RandomStream stream{static_cast<uint64_t>(seed), kernels::hash_name(name),
                                     distribution_of(distribution), static_cast<float>(a),
                                     static_cast<float>(b)};
  const int64_t columns = out.size(-1);
  const int64_t rows = columns == 0 ? 0 : out.numel() / columns;
  const auto dtype = data_type(out.scalar_type());
  auto* data = static_cast<std::byte*>(out.mutable_data_ptr());
  for (int64_t row = 0; row < rows; ++row) {
    // Row number -> index of the row's first element in the full tensor.
    int64_t remaining = row, scale = full_sizes[num_dims - 1], first = offsets[num_dims - 1];
    for (size_t d = num_dims - 1; d-- > 0;) {
      first += (offsets[d] + remaining % out.size(d)) * scale;
      remaining /= out.size(d);
      scale *= full_sizes[d];
    }
    kernels::fill_random(data + row * columns * kernels::size_of(dtype), first, columns, dtype,
                         stream);
  }
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &fill_random_); }

}  // namespace axonn::ops::cpu
