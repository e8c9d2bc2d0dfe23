// One rank's part of an op whose GEMM starts on chunks as they arrive, or sends chunks as they
// finish. Nothing waits on the host, and nothing depends on host state that changes from call to
// call, so a CUDA graph can replay the work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/fused/handshake.h"
#include "core/cuda/fused/shard_transport.h"
#include "core/cuda/fused/sum_broadcast.h"
#include "core/cuda/fused/switch_sum.h"

namespace axonn::kernels::cuda {

// The kernels for an architecture, from their extension module or from Triton.
struct GemmBackend {
  const char* (*why_unsupported)(const FusedGemm& gemm);
  cudaError_t (*launch)(const FusedGemm& gemm, const LaunchConfig& config, cudaStream_t stream);
  cudaError_t (*sum_to_all)(const SumToAll& sum, cudaStream_t stream);  // null if there is none
  // The sum in the switch; null if sum_to_all is null.
  cudaError_t (*sum_in_switch)(const Peers& peers, const SwitchSum& sum, cudaStream_t stream);
  cudaError_t (*load)();
  bool chooses_tiles = false;  // by itself; it reads only num_ctas of a config
};

// Loads every kernel of a fused call onto the current device. Must be called before the first call:
// otherwise CUDA loads a kernel at its first launch and may wait for running kernels, which may in
// turn wait for work that this rank has yet to enqueue.
void load_kernels(const GemmBackend& backend);

// Whether a call's work on its two streams runs concurrently. On plain streams it does. A CUDA
// graph may run its branches one after the other, in any order, and a GEMM that comes first would
// wait for copies that its peers make after their own GEMMs.
enum class Branches {
  kSideBySide,  // guaranteed
  kExpected,    // likely; if not, the GEMM notices (SpinLimit::own_rows_left)
  kInTurn,      // no: the work that peers wait for is done before the GEMM begins
};

struct CallStreams {
  cudaStream_t compute;
  cudaStream_t copy;  // for the transport or the switch's sum
  cudaEvent_t begun;  // this rank's events, without timing, reused by every call
  cudaEvent_t delivered;
  Branches branches = Branches::kSideBySide;
};

int64_t gather_workspace_bytes(const GatheredRows& rows);
int64_t reduce_scatter_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks);
int64_t all_reduce_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks);

// Computes D, the product with the gathered matrix. `arriving` says whether the gathered rows are
// rows of A, columns of B or lie along K. The caller leaves that operand null, because it is in the
// workspace. `transport` delivers the other ranks' rows on the copy stream.
void all_gather_gemm(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, Arriving arriving, const GatheredRows& rows,
                     ShardTransport& transport, const CallStreams& streams);

// Sets output [m / num_ranks, n] to this rank's rows of the sum of A @ B over all ranks, added in
// rank order in fp32.
void gemm_reduce_scatter(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         FusedGemm gemm, void* output, const CallStreams& streams);

// Returns the sum-broadcast problem of an all-reduce of these rows. `any_order` allows results
// whose bits differ from call to call.
SumBroadcastProblem sum_broadcast_problem(const Peers& peers, const GemmBackend& backend,
                                          const FusedGemm& gemm, bool any_order = false);

// Sets output [m, n] to the sum of A @ B over all ranks: by a reduce-scatter whose sums are then
// broadcast to all ranks or, with kSwitch, by the switch, in parts that follow the GEMM. Throws
// std::invalid_argument if why_no_sum_broadcast rejects `way`.
void gemm_all_reduce(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, SumBroadcast way, void* output, const CallStreams& streams);

}  // namespace axonn::kernels::cuda
