// Serializes all fused calls of a device, whatever their groups and streams: each fills the device
// with a grid that waits for peers, and two such grids would keep each other's peers from running.
// Calls captured by a CUDA graph take part in this order at every replay.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "core/cuda/stream.h"

namespace axonn::kernels::cuda {

class CallOrder {
 public:
  // Created on the current device.
  CallOrder() = default;

  // Spans a call's work on its stream, from the first to the last thing enqueued. An exception also
  // ends the turn, because the next call must come after whatever was enqueued.
  class Turn {
   public:
    Turn(CallOrder& order, cudaStream_t stream);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    bool is_captured() const { return capture_.has_value(); }
    void end();

   private:
    cudaError_t record_end();

    CallOrder& order_;
    cudaStream_t stream_;
    std::optional<unsigned long long> capture_;  // capture id, if a graph captures the stream
    bool ended_ = false;
  };

  // Blocks the host until all calls have ended, including those of replays.
  void synchronize() const { AXONN_CUDA_CHECK(cudaEventSynchronize(ended_.get())); }

 private:
  struct Captured {
    unsigned long long capture;
    cudaStream_t stream;
  };

  // Recorded after each call, also when a graph replays the call.
  axonn::cuda::Event ended_;
  std::optional<cudaStream_t> last_;  // the stream of the last call that no graph captured
  // Recorded after each captured call, for calls on other streams of the same capture.
  axonn::cuda::Event captured_ended_;
  std::optional<Captured> last_captured_;
};

}  // namespace axonn::kernels::cuda
