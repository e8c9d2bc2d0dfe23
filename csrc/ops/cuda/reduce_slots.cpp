#include "ops/reduce_slots.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/reduce.h"

namespace axonn::ops::cuda {
namespace {

at::Tensor reduce_slots(const at::Tensor& slots) {
  const c10::cuda::CUDAGuard guard(slots.device());
  const auto call = SlotSum::of(slots, kernels::cuda::kMaxSlots);
  const std::vector<const void*> sources(call.slots.begin(), call.slots.end());
  AXONN_CUDA_CHECK(kernels::cuda::reduce_slots(
      call.sum.mutable_data_ptr(), sources.data(), slots.size(0), call.sum.numel(),
      data_type(slots.scalar_type()), kernels::ReduceOp::kSum,
      c10::cuda::getCurrentCUDAStream().stream()));
  return call.sum;
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CUDA, m) { m.impl(kReduceSlots, &reduce_slots); }

}  // namespace axonn::ops::cuda
