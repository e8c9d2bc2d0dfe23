// Streams and events that are destroyed with their objects.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <utility>

#include "core/cuda/check.h"

namespace axonn::cuda {

// Makes a device current for the guard's lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    AXONN_CUDA_CHECK(cudaGetDevice(&previous_));
    if (device != previous_) AXONN_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceGuard() { (void)cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// A point in a stream, for ordering streams. It measures no time. Created on the current device.
class Event {
 public:
  Event() { AXONN_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) { AXONN_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  // Makes work enqueued on the stream from now on run after this point. Does not block the host.
  void block(cudaStream_t stream) const {
    AXONN_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
  }
  bool is_done() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    AXONN_CUDA_CHECK(status);
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// A stream of the highest priority that does not synchronize with the legacy default stream. When
// SMs become free, its kernels get them before those of a running GEMM.
class HighPriorityStream {
 public:
  HighPriorityStream() {
    int lowest = 0, highest = 0;
    AXONN_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    AXONN_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
  }
  ~HighPriorityStream() {
    if (!stays_) (void)cudaStreamDestroy(stream_);
  }
  HighPriorityStream(const HighPriorityStream&) = delete;
  HighPriorityStream& operator=(const HighPriorityStream&) = delete;

  cudaStream_t get() const { return stream_; }
  // Keeps the stream when this object is destroyed: others will use it for an unknown time.
  void stay() { stays_ = true; }

 private:
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> stays_ = false;
};

}  // namespace axonn::cuda
