// What a rank holds on its device for fused calls, besides the workspaces.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "core/cuda/check.h"
#include "core/cuda/fused/fused_calls.h"
#include "core/symmetric/epoch_flag.h"

namespace axonn::ops::cuda {

// Behind the flags of a pad lies what only this rank uses, each part on cache lines of its own: the
// epoch, the counters, and room for a failure.
inline constexpr int64_t kStateBytes = 1024;

// Sets the pad of peers.rank, which is zeros at first, and the pointers to what lies in it.
inline void set_own_pad(kernels::cuda::Peers& peers, void* pad) {
  auto* state = static_cast<char*>(pad) + kernels::cuda::kPadBytes;
  peers.pads[peers.rank] = pad;
  peers.epoch = reinterpret_cast<uint32_t*>(state);
  peers.counters = reinterpret_cast<uint32_t*>(state + kStateBytes / 2);
}

// An event that orders streams and measures no time.
class OrderEvent {
 public:
  OrderEvent() { AXONN_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~OrderEvent() { (void)cudaEventDestroy(event_); }
  OrderEvent(const OrderEvent&) = delete;
  OrderEvent& operator=(const OrderEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// A rank's pinned host memory. A kernel that waits in vain writes there for whom it waits; and it
// holds the epoch that the copy engine pushes.
class PinnedState {
 public:
  PinnedState() {
    AXONN_CUDA_CHECK(cudaHostAlloc(&state_, sizeof(State), cudaHostAllocPortable));
    *state_ = {};
  }
  ~PinnedState() { (void)cudaFreeHost(state_); }
  PinnedState(const PinnedState&) = delete;
  PinnedState& operator=(const PinnedState&) = delete;

  kernels::cuda::SpinFailure& failure() const { return state_->failure; }
  uint32_t* epoch_to_push() const { return &state_->epoch; }

 private:
  struct State {
    kernels::cuda::SpinFailure failure;
    alignas(comm::kFlagAlignment) uint32_t epoch;
  };
  State* state_ = nullptr;
};

// The stream on which a rank's shard is pushed to its peers, and the events that order it.
struct CopyLane {
  explicit CopyLane(c10::DeviceIndex device)
      : stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device)) {}

  kernels::cuda::CallStreams behind(const c10::cuda::CUDAStream& compute) const {
    return {compute.stream(), stream.stream(), begun.get(), delivered.get()};
  }

  c10::cuda::CUDAStream stream;
  OrderEvent begun, delivered;
};

}  // namespace axonn::ops::cuda
