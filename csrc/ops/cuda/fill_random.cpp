#include "core/cuda/fill_random.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "core/cuda/check.h"
#include "ops/checks.h"
#include "ops/fill_random.h"

namespace axonn::ops::cuda {
namespace {

constexpr auto kOp = "fill_random_";

}  // namespace

void fill_random_(const at::Tensor& out, at::IntArrayRef full_sizes, at::IntArrayRef offsets,
                  const std::string& name, int64_t seed, const std::string& distribution, double a,
                  double b) {
  check_reducible(kOp, "out", out);
  const auto layout = block_layout(kOp, out, full_sizes, offsets);
  const auto stream = random_stream(kOp, name, seed, distribution, a, b);
  const c10::cuda::CUDAGuard guard(out.device());
  AXONN_CUDA_CHECK(kernels::cuda::fill_random(out.mutable_data_ptr(), layout,
                                              data_type(out.scalar_type()), stream,
                                              c10::cuda::getCurrentCUDAStream().stream()));
}

TORCH_LIBRARY_IMPL(axonn, CUDA, m) { m.impl(kOp, &fill_random_); }

}  // namespace axonn::ops::cuda
