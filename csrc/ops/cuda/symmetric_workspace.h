// Device memory that the ranks of a group map of each other, for fused calls: torch's symmetric
// memory, pooled by group and device, and grown where a call needs more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/cuda/fused_calls.h"
#include "core/launch_config.h"

namespace axonn::ops::cuda {

// A call of a rank, for a workspace of some bytes: enqueued on the current stream, and on the
// streams that it is given.
struct PreparedCall {
  int64_t workspace_bytes;
  std::function<at::Tensor(const kernels::cuda::Peers&, const kernels::cuda::CallStreams&)> run;
};

// Makes a call with the workspace of a group on a device. `prepare` is told what a GEMM must leave
// free there. The first call of a group, and each that needs more than any before, is collective:
// ranks exchange mappings, after waiting for the calls before on the host.
//
// Raises NotImplementedError where the group has more ranks than kernels serve, or not all of its
// GPUs reach each other's memory. Growth while a graph is captured is refused: make the call once
// before. What graphs have captured keeps its memory.
at::Tensor call_fused(const char* op, const std::string& group_name, int64_t group_size,
                      c10::Device device, double timeout_seconds,
                      const std::function<PreparedCall(const kernels::Residency&)>& prepare);

// Bytes that this process has allocated for all groups.
int64_t symmetric_workspace_bytes();

}  // namespace axonn::ops::cuda
