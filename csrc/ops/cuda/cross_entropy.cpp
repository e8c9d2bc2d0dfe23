// The row kernels of cross-entropy on GPUs.
#include "core/cuda/cross_entropy.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "core/cuda/check.h"
#include "ops/cross_entropy.h"

namespace axonn::ops::cuda {
namespace {

kernels::cuda::LogitRows rows_of(const at::Tensor& logits, const at::Tensor& labels,
                                 int64_t first_column, int64_t ignore_index) {
  return {logits.const_data_ptr(),
          labels.const_data_ptr<int64_t>(),
          logits.size(0),
          logits.size(1),
          logits.stride(0),
          first_column,
          ignore_index};
}

at::Tensor cross_entropy_scan(const at::Tensor& logits, const at::Tensor& labels,
                              int64_t first_column, int64_t ignore_index) {
  const c10::cuda::CUDAGuard guard(logits.device());
  auto found = at::empty({3, logits.size(0)}, logits.options().dtype(statistics_dtype(logits)));
  AXONN_CUDA_CHECK(kernels::cuda::cross_entropy_scan(
      rows_of(logits, labels, first_column, ignore_index), found.mutable_data_ptr(),
      logits_dtype(logits), c10::cuda::getCurrentCUDAStream().stream()));
  return found;
}

void cross_entropy_gradient(const at::Tensor& dy, const at::Tensor& logits,
                            const at::Tensor& labels, const at::Tensor& statistics,
                            int64_t first_column, int64_t ignore_index, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(logits.device());
  AXONN_CUDA_CHECK(kernels::cuda::cross_entropy_gradient(
      rows_of(logits, labels, first_column, ignore_index), dy.const_data_ptr(),
      statistics.const_data_ptr(), out.mutable_data_ptr(), out.stride(0), logits_dtype(logits),
      c10::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CUDA, m) {
  m.impl("_cross_entropy_scan", &cross_entropy_scan);
  m.impl("_cross_entropy_gradient", &cross_entropy_gradient);
}

}  // namespace axonn::ops::cuda
