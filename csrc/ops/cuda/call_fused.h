// Makes the fused calls of a group's ranks, and chooses for each the workspace and the transport
// that brings the rows that a gather waits for.
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
  // "copy_engine", over symmetric memory; "nccl", for gathers only; or "auto", which is nccl if the
  // ranks are on several hosts and nccl_sms is not 0.
  const std::string& transport;
  int64_t nccl_sms;     // that a GEMM leaves to NCCL; the same on all ranks
  int64_t free_sms;     // left free for other kernels, at most half
  bool graphs_in_turn;  // whether CUDA graphs run their branches one after the other
};

// Makes a call with the workspace of a group on a device. `prepare` is told what a GEMM must leave
// free there. The first call of a group is collective, and so is, over symmetric memory, each call
// that needs more memory than any before: ranks exchange mappings, after the host has waited for
// the calls before. torch numbers these exchanges by process, not by group, so ranks that take part
// in one must have made equally many before, in whatever groups.
//
// Raises ValueError for another transport and for too few SMs. Raises NotImplementedError where the
// group has more ranks than kernels serve, or where its GPUs do not all reach each other's memory.
// While a graph is captured, a first call and growth are refused: make the call once before. Memory
// that graphs have captured is kept. Calls of a device run one after the other, those of replays
// included.
at::Tensor call_fused(const char* op, const CallGroup& group,
                      const std::function<PreparedCall(const kernels::Residency&)>& prepare);

// Frees the workspaces of all groups once their calls have ended, but not what graphs have
// captured. Collective for each group with a workspace over symmetric memory; groups come in the
// order of their names. The next call of a group is a first call as above.
void release_workspaces();

// Bytes of symmetric memory that this process has allocated for all groups.
int64_t symmetric_workspace_bytes();

}  // namespace axonn::ops::cuda
