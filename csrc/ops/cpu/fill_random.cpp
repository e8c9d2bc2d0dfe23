#include "ops/fill_random.h"

#include <torch/library.h>

#include "ops/checks.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "fill_random_";

}  // namespace

void fill_random_(const at::Tensor& out, at::IntArrayRef full_sizes, at::IntArrayRef offsets,
                  const std::string& name, int64_t seed, const std::string& distribution, double a,
                  double b) {
  check_reducible(kOp, "out", out);
  const auto layout = block_layout(kOp, out, full_sizes, offsets);
  const auto stream = random_stream(kOp, name, seed, distribution, a, b);
  const auto dtype = data_type(out.scalar_type());
  const int64_t row_bytes = layout.columns * kernels::size_of(dtype);
  if (row_bytes == 0) return;
  auto* data = static_cast<std::byte*>(out.mutable_data_ptr());
  for (int64_t row = 0; row < layout.rows; ++row) {
    kernels::fill_random(data + row * row_bytes, layout.row_start(row), layout.columns, dtype,
                         stream);
  }
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &fill_random_); }

}  // namespace axonn::ops::cpu
