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

// One call with the workspace of a group on a device: `run` enqueues it on the current stream, and
// on the streams it is given, and returns its result. The first call of a group, and each that
// needs more than any before, is collective: ranks exchange mappings, after waiting for the calls
// before on the host.
//
// Raises NotImplementedError where not all of its GPUs reach each other's memory. Growth while a
// graph is captured is refused: make the call once before. What graphs have captured keeps its
// memory.
at::Tensor with_workspace(const char* op, const std::string& group_name, c10::Device device,
                          int64_t bytes, double timeout_seconds,
                          const std::function<at::Tensor(const kernels::cuda::Peers&,
                                                         const kernels::cuda::CallStreams&)>& run);

// What a GEMM of the group must leave free on the device. Collective in the first call of a group.
// Raises NotImplementedError where the group has more ranks than kernels serve.
kernels::Residency residency_of(const char* op, const std::string& group_name, int64_t group_size,
                                c10::Device device, double timeout_seconds);

// Bytes that this process has allocated for all groups.
int64_t symmetric_workspace_bytes();

}  // namespace axonn::ops::cuda
