// The memory, flags and transport stream that a rank of a group holds on a device for fused calls.
// Memory grows when a call needs more. Derived classes decide how peers reach it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/cuda/fused/call_order.h"
#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/fused/workspace_memory.h"
#include "core/gemm/launch_config.h"

namespace axonn::ops::cuda {

using kernels::cuda::kFrontBytes;

// Returns whether the current stream is being captured into a graph.
bool is_capturing();

// The place where a call is enqueued.
struct CallPlace {
  const kernels::cuda::Peers& peers;
  const kernels::cuda::CallStreams& streams;
  kernels::cuda::ShardTransport& transport;  // for gathers
};

// A rank's call, with the bytes of workspace that it needs. It is enqueued on the current stream
// and on the streams that it is given.
struct PreparedCall {
  int64_t workspace_bytes;
  std::function<at::Tensor(const CallPlace&)> run;
};

class Workspace {
 public:
  Workspace(std::string group_name, c10::Device device, double timeout_seconds,
            kernels::cuda::CallOrder& order);
  virtual ~Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Returns how much a GEMM must leave free on the device.
  virtual kernels::Residency residency() const = 0;

  int64_t bytes() const { return held_.bytes(); }

  // Frees the memory unless a graph uses it, after the host has waited for earlier calls. The next
  // call gets new memory.
  void release();
  // Waits for earlier calls, and returns whether the whole workspace can be destroyed.
  bool is_unused() const;

  // Grows to at least `bytes`, after the host has waited for earlier calls. This is refused while a
  // graph is captured. Memory that graphs have captured is kept.
  void require(const char* op, int64_t bytes);

  // `graphs_in_turn` says that graphs run their branches one after the other.
  at::Tensor call(const PreparedCall& prepared, bool graphs_in_turn);

 protected:
  // Replaces the memory by `size` bytes that begin with kFrontBytes zeros, and sets peers_. `keep`
  // says that a graph uses the old memory, which must then be kept.
  virtual void grow(const char* op, int64_t size, bool keep) = 0;
  // Frees the memory if `may_free` is true on all ranks that map it. Returns whether it did.
  virtual bool free_memory(bool may_free) = 0;
  virtual kernels::cuda::ShardTransport& transport() = 0;

  // Zeroes the front of the memory, and returns once that is done.
  void clear_front(const at::Tensor& memory) const;

  const std::string group_name_;
  const c10::Device device_;
  kernels::cuda::Peers peers_;

 private:
  std::shared_ptr<kernels::cuda::PinnedState> pinned_ =
      std::make_shared<kernels::cuda::PinnedState>();
  kernels::cuda::CopyLane copies_;
  kernels::cuda::CallOrder& order_;
  kernels::cuda::WorkspaceMemory held_;
};

}  // namespace axonn::ops::cuda
