// What a rank holds on its device for fused calls, beside the workspaces.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "core/cuda/check.h"
#include "core/cuda/fused_calls.h"

namespace axonn::ops::cuda {

// Behind the flags of a pad lie what this rank alone uses, each on lines of its own: the epoch, the
// counters, and room for a failure.
inline constexpr int64_t kStateBytes = 1024;

// Sets the pad of peers.rank, zeros at first, and what lies in it.
inline void set_own_pad(kernels::cuda::Peers& peers, void* pad) {
  auto* state = static_cast<char*>(pad) + kernels::cuda::kPadBytes;
  peers.pads[peers.rank] = pad;
  peers.epoch = reinterpret_cast<uint32_t*>(state);
  peers.counters = reinterpret_cast<uint32_t*>(state + kStateBytes / 2);
}

// An event that orders streams and measures nothing.
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

// Pinned memory in which a kernel that waits in vain says for whom.
class FailureRecord {
 public:
  FailureRecord() {
    AXONN_CUDA_CHECK(cudaHostAlloc(&record_, sizeof(*record_), cudaHostAllocMapped));
    *record_ = {};
  }
  ~FailureRecord() { (void)cudaFreeHost(record_); }
  FailureRecord(const FailureRecord&) = delete;
  FailureRecord& operator=(const FailureRecord&) = delete;
  kernels::cuda::SpinFailure* get() const { return record_; }

 private:
  kernels::cuda::SpinFailure* record_ = nullptr;
};

// The stream on which a rank's shard is pushed to its peers, and what orders it.
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
