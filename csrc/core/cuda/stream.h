// Streams and events that are destroyed with their objects.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "core/cuda/check.h"

namespace axonn::cuda {

// Makes a device current as long as it lives.
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

// A point in a stream. Orders streams, times nothing. Made on the current device.
class Event {
 public:
  Event() { AXONN_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { AXONN_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  // What is enqueued on the stream from now on runs after this point. Does not block the host.
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

// A stream that does not wait for the legacy default stream, of the highest priority: its kernels
// get the SMs that become free before those of a GEMM that is under way.
class HighPriorityStream {
 public:
  HighPriorityStream() {
    int lowest = 0, highest = 0;
    AXONN_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    AXONN_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
  }
  ~HighPriorityStream() { (void)cudaStreamDestroy(stream_); }
  HighPriorityStream(const HighPriorityStream&) = delete;
  HighPriorityStream& operator=(const HighPriorityStream&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace axonn::cuda
