#include "ops/cuda/workspace.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "core/cuda/check.h"
#include "ops/checks.h"
#include "ops/cuda/failure_watch.h"

namespace axonn::ops::cuda {
namespace {

constexpr uint64_t kLeastBytes = 2 << 20;  // a page of device memory

}  // namespace

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

Workspace::Workspace(std::string group_name, c10::Device device, double timeout_seconds,
                     kernels::cuda::CallOrder& order)
    : group_name_(std::move(group_name)), device_(device), order_(order) {
  peers_.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &pinned_->failure(), 0};
  watch_for_failure(pinned_, group_name_);
}

void Workspace::require(const char* op, int64_t bytes) {
  if (bytes <= bytes_) return;
  TORCH_CHECK(!is_capturing(), op, ": the workspace of group '", group_name_, "' must grow from ",
              bytes_, " to ", bytes,
              " bytes, which cannot be captured into a graph; make the call once before capturing "
              "it");
  // Peers may still write what this rank has asked for, so all ranks wait for their calls before
  // the old memory is freed.
  order_.synchronize();
  const auto size = static_cast<int64_t>(
      std::bit_ceil(std::max(static_cast<uint64_t>(bytes + kFrontBytes), kLeastBytes)));
  grow(op, size, captured_);
  captured_ = false;
  peers_.epoch_to_push = pinned_->epoch_to_push(memories_++);
  bytes_ = size - kFrontBytes;
}

at::Tensor Workspace::call(const PreparedCall& prepared) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  kernels::cuda::CallOrder::Turn turn(order_, stream);
  captured_ = captured_ || turn.is_captured();
  auto output = prepared.run({peers_, copies_.behind(stream), transport()});
  turn.end();
  return output;
}

void Workspace::clear_front(const at::Tensor& memory) const {
  const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  AXONN_CUDA_CHECK(cudaMemsetAsync(memory.mutable_data_ptr(), 0, kFrontBytes, stream));
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));  // before anyone can raise a flag
}

}  // namespace axonn::ops::cuda
