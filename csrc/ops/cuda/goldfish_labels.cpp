#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "core/cuda/check.h"
#include "core/cuda/goldfish.h"
#include "ops/goldfish.h"

namespace axonn::ops::cuda {
namespace {

at::Tensor goldfish_labels(const at::Tensor& tokens, const std::optional<at::Tensor>& documents,
                           int64_t k, int64_t h, bool with_target, int64_t ignore_index) {
  const c10::cuda::CUDAGuard guard(tokens.device());
  const auto call = GoldfishCall::of(tokens, documents, k, h, with_target);
  AXONN_CUDA_CHECK(kernels::cuda::goldfish_labels(call.rows(), call.rule, ignore_index,
                                                  call.labels.mutable_data_ptr<int64_t>(),
                                                  c10::cuda::getCurrentCUDAStream().stream()));
  return call.labels;
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CUDA, m) { m.impl(kGoldfishLabels, &goldfish_labels); }

}  // namespace axonn::ops::cuda
