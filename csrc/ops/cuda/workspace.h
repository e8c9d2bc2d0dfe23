// What a rank of a group holds on a device for fused calls: memory, flags, a stream for the
// transport; grown where a call needs more. How peers come to it is up to those that derive.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/cuda/fused/fused_calls.h"
#include "core/gemm/launch_config.h"
#include "ops/cuda/peer_state.h"

namespace axonn::ops::cuda {

inline constexpr int64_t kFrontBytes =  // the pad, in front of the workspace
    kernels::cuda::kPadBytes + kStateBytes;

// Whether the current stream is being captured into a graph.
bool is_capturing();

// What a call is enqueued with.
struct CallPlace {
  const kernels::cuda::Peers& peers;
  const kernels::cuda::CallStreams& streams;
  kernels::cuda::ShardTransport& transport;  // of gathers
};

// A call of a rank, for a workspace of some bytes: enqueued on the current stream, and on the
// streams that it is given.
struct PreparedCall {
  int64_t workspace_bytes;
  std::function<at::Tensor(const CallPlace&)> run;
};

// Fused calls of a device follow each other, whatever groups and streams they are of: each fills
// the device with a grid that waits for peers, and two would keep each other's from running.
struct DeviceOrder {
  OrderEvent ended;
  std::optional<c10::cuda::CUDAStream> last;
};

class Workspace {
 public:
  Workspace(std::string group_name, c10::Device device, double timeout_seconds, DeviceOrder& order);
  virtual ~Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // What a GEMM must leave free on the device.
  virtual kernels::Residency residency() const = 0;

  int64_t bytes() const { return bytes_; }

  // Grows to so many bytes if there are fewer, after waiting for the calls before on the host.
  // Refused while a graph is captured. What graphs have captured keeps its memory.
  void require(const char* op, int64_t bytes);

  at::Tensor call(const PreparedCall& prepared);

 protected:
  // Replaces the memory by `size` bytes that begin with kFrontBytes zeros, and sets peers_.
  // `keep`: a graph knows the old.
  virtual void grow(const char* op, int64_t size, bool keep) = 0;
  virtual kernels::cuda::ShardTransport& transport() = 0;

  // Zeros that are there when this returns.
  void clear_front(const at::Tensor& memory) const;

  const std::string group_name_;
  const c10::Device device_;
  kernels::cuda::Peers peers_;

 private:
  std::shared_ptr<PinnedState> pinned_ = std::make_shared<PinnedState>();
  CopyLane copies_;
  DeviceOrder& order_;
  bool captured_ = false;  // a graph knows the memory
  int64_t bytes_ = 0;
};

}  // namespace axonn::ops::cuda
