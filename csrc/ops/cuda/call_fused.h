// Fused calls of the ranks of a group: with which workspace, and which transport brings the rows
// that a gather waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "core/gemm/launch_config.h"
#include "ops/cuda/workspace.h"

namespace axonn::ops::cuda {

// The group of a call, and what its ranks have in common.
struct CallGroup {
  const std::string& name;
  int64_t size;
  c10::Device device;
  double timeout_seconds;
  // "copy_engine", over symmetric memory; "nccl", of gathers only; "auto": nccl where the ranks are
  // of several hosts and nccl_sms is not 0.
  const std::string& transport;
  int64_t nccl_sms;  // that a GEMM leaves to NCCL; the same on all ranks
};

// Makes a call with the workspace of a group on a device. `prepare` is told what a GEMM must leave
// free there. The first call of a group, and over symmetric memory each that needs more than any
// before, is collective: ranks exchange mappings, after waiting for the calls before on the host.
// torch numbers these exchanges by process, not by group: ranks that meet must have made equally
// many before, in whatever groups.
//
// Raises ValueError for another transport and too few SMs; NotImplementedError where the group has
// more ranks than kernels serve, or not all of its GPUs reach each other's memory. A first call and
// growth while a graph is captured are refused: make the call once before. What graphs have
// captured keeps its memory.
at::Tensor call_fused(const char* op, const CallGroup& group,
                      const std::function<PreparedCall(const kernels::Residency&)>& prepare);

// Bytes of symmetric memory that this process has allocated for all groups.
int64_t symmetric_workspace_bytes();

}  // namespace axonn::ops::cuda
