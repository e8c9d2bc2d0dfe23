#include "ops/cuda/workspace.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "core/cuda/check.h"
#include "ops/checks.h"
#include "ops/cuda/failure_watch.h"

namespace axonn::ops::cuda {

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
  if (bytes <= held_.bytes()) return;
  TORCH_CHECK(!is_capturing(), op, ": the workspace of group '", group_name_, "' must grow from ",
              held_.bytes(), " to ", bytes,
              " bytes, which cannot be captured into a graph; make the call once before capturing "
              "it");
  held_.grow(bytes, order_, *pinned_, peers_,
             [&](int64_t size, bool keep) { grow(op, size, keep); });
}

void Workspace::release() {
  order_.synchronize();
  if (free_memory(!held_.is_captured())) held_.release();
}

bool Workspace::is_unused() const {
  order_.synchronize();
  return !held_.graphs_use_any();
}

at::Tensor Workspace::call(const PreparedCall& prepared, bool graphs_in_turn) {
  using kernels::cuda::Branches;
  const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  kernels::cuda::CallOrder::Turn turn(order_, stream);
  held_.enter_call(turn.is_captured(), peers_);
  auto streams = copies_.behind(stream);
  if (turn.is_captured()) {
    streams.branches = graphs_in_turn ? Branches::kInTurn : Branches::kExpected;
  }
  auto output = prepared.run({peers_, streams, transport()});
  held_.leave_call(peers_);
  turn.end();
  return output;
}

void Workspace::clear_front(const at::Tensor& memory) const {
  const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  AXONN_CUDA_CHECK(cudaMemsetAsync(memory.mutable_data_ptr(), 0, kFrontBytes, stream));
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));  // before any peer can raise a flag
}

}  // namespace axonn::ops::cuda
