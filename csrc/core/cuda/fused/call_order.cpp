#include "core/cuda/fused/call_order.h"

#include "core/cuda/check.h"

namespace axonn::kernels::cuda {
namespace {

std::optional<unsigned long long> capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  AXONN_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  return id;
}

}  // namespace

// A replay waits for the work that last recorded the event before the replay was launched, and
// records the event for later waiters. Source: cudaStreamWaitEvent, cudaEventWaitExternal and
// cudaEventRecordExternal in the CUDA runtime's manual; NCCL orders its graphs in the same way
// (src/misc/strongstream.cc).
CallOrder::Turn::Turn(CallOrder& order, cudaStream_t stream)
    : order_(order), stream_(stream), capture_(capture_of(stream)) {
  const auto wait_for = [&](const axonn::cuda::Event& event, unsigned flags) {
    AXONN_CUDA_CHECK(cudaStreamWaitEvent(stream, event.get(), flags));
  };
  const auto& captured = order.last_captured_;
  if (!capture_) {
    // A replay may have been launched on any stream.
    if (captured || (order.last_ && *order.last_ != stream)) wait_for(order.ended_, 0);
  } else if (captured && captured->capture == *capture_) {
    if (captured->stream != stream) wait_for(order.captured_ended_, 0);
  } else {
    wait_for(order.ended_, cudaEventWaitExternal);
  }
}

CallOrder::Turn::~Turn() {
  if (!ended_) (void)record_end();
}

void CallOrder::Turn::end() {
  ended_ = true;
  AXONN_CUDA_CHECK(record_end());
}

cudaError_t CallOrder::Turn::record_end() {
  if (!capture_) {
    order_.last_ = stream_;
    return cudaEventRecord(order_.ended_.get(), stream_);
  }
  order_.last_captured_ = Captured{*capture_, stream_};
  const cudaError_t error =
      cudaEventRecordWithFlags(order_.ended_.get(), stream_, cudaEventRecordExternal);
  if (error != cudaSuccess) return error;
  return cudaEventRecord(order_.captured_ended_.get(), stream_);
}

}  // namespace axonn::kernels::cuda
