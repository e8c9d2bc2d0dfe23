// Makes the fused calls of a group's ranks. For each call it chooses the workspace, and the
// transport that delivers the rows that a gather waits for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "core/gemm/launch_config.h"
#include "ops/cuda/workspace.h"

namespace axonn::ops::cuda {

// The group of a call, and the call's settings.
struct CallGroup {
  const std::string& name;
  int64_t size;
  c10::Device device;
  double timeout_seconds;
  // "copy_engine" (over symmetric memory), "nccl" (for gathers only), or "auto", which is nccl if
  // the ranks are on several hosts and nccl_sms is not 0, and copy_engine otherwise.
  const std::string& transport;
  int64_t nccl_sms;     // SMs that a GEMM leaves to NCCL; the same on all ranks
  int64_t free_sms;     // SMs left free for other kernels, at most half of them
  bool graphs_in_turn;  // whether CUDA graphs run their branches one after the other
};

// Makes a call with the group's workspace on a device. `prepare` receives what a GEMM must leave
// free there. The first call of a group is collective. Over symmetric memory, so is each call that
// needs more memory than any before: ranks exchange mappings, after the host has waited for earlier
// calls. torch numbers these exchanges per process, not per group, so ranks that take part in one
// must have taken part in equally many before, whatever the groups.
//
// Raises ValueError for an unknown transport and for too few SMs. Raises NotImplementedError if the
// group has more ranks than kernels serve, or if its GPUs do not all reach each other's memory.
// While a graph is captured, a first call and growth are refused: make the call once before
// capturing. Memory that graphs have captured is kept. Calls on a device run one after the other,
// including those of replays.
at::Tensor call_fused(const char* op, const CallGroup& group,
                      const std::function<PreparedCall(const kernels::Residency&)>& prepare);

// Frees the workspaces of all groups once their calls have ended, except memory that graphs have
// captured. Collective for each group with a workspace over symmetric memory, in the order of the
// groups' names. The next call of a group is a first call as above.
void release_workspaces();

// Bytes of symmetric memory that this process has allocated for all groups.
int64_t symmetric_workspace_bytes();

}  // namespace axonn::ops::cuda
