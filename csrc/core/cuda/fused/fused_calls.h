// What one rank enqueues, and where, for an op whose GEMM starts on what has arrived or sends what
// is finished. Nothing waits on the host, and nothing depends on host state that changes from call
// to call, so a CUDA graph can replay it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/fused/handshake.h"
#include "core/cuda/fused/shard_transport.h"
#include "core/cuda/fused/sum_broadcast.h"
#include "core/cuda/fused/switch_sum.h"

namespace axonn::kernels::cuda {

// The kernels of an architecture, from the extension module that holds them, or from Triton.
struct GemmBackend {
  const char* (*why_unsupported)(const FusedGemm& gemm);
  cudaError_t (*launch)(const FusedGemm& gemm, const LaunchConfig& config, cudaStream_t stream);
  cudaError_t (*sum_to_all)(const SumToAll& sum, cudaStream_t stream);  // null: there is none
  // The sum that the switch adds up; null if sum_to_all is.
  cudaError_t (*sum_in_switch)(const Peers& peers, const SwitchSum& sum, cudaStream_t stream);
  cudaError_t (*load)();
  bool chooses_tiles = false;  // by itself: of a config, it reads num_ctas alone
};

// Loads every kernel of a fused call onto the current device. It is to be called before the first
// call. Otherwise CUDA loads a kernel at its first launch, which may wait for kernels that run;
// those may wait for what this rank has yet to enqueue.
void load_kernels(const GemmBackend& backend);

// Whether what a call enqueues on its two streams runs side by side. Streams do. The branches of a
// CUDA graph may be run one after the other, in any order, and a GEMM that comes first would wait
// for copies that its peers make behind theirs.
enum class Branches {
  kSideBySide,  // for certain
  kExpected,    // if not, the GEMM notices (SpinLimit::own_rows_left)
  kInTurn,      // not: what the peers wait for is done before the GEMM begins
};

struct CallStreams {
  cudaStream_t compute;
  cudaStream_t copy;  // of the transport
  cudaEvent_t begun;  // events of this rank, without timing, that every call uses again
  cudaEvent_t delivered;
  Branches branches = Branches::kSideBySide;
};

int64_t gather_workspace_bytes(const GatheredRows& rows);
int64_t reduce_scatter_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks);
int64_t all_reduce_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks);

// Computes D, the product with the gathered matrix. `arriving` says whether its rows are rows of A,
// columns of B or lie along K. The caller leaves that operand null, because it is the workspace.
// `transport` delivers the other ranks' rows on the copy stream.
void all_gather_gemm(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, Arriving arriving, const GatheredRows& rows,
                     ShardTransport& transport, const CallStreams& streams);

// Sets output [m / num_ranks, n] to this rank's rows of the sum over ranks of A @ B, added in the
// order of ranks in fp32.
void gemm_reduce_scatter(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         FusedGemm gemm, void* output, const CallStreams& streams);

// Describes the sum broadcast for an all-reduce of these rows. `any_order` says that its bits need
// not be the same from call to call.
SumBroadcastProblem sum_broadcast_problem(const Peers& peers, const GemmBackend& backend,
                                          const FusedGemm& gemm, bool any_order = false);

// Sets output [m, n] to the sum over ranks of A @ B, by a reduce-scatter whose sums are broadcast
// to all ranks; or, with kSwitch, by the switch, in parts that follow the GEMM. Throws
// std::invalid_argument for a sum broadcast that why_no_sum_broadcast refuses.
void gemm_all_reduce(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, SumBroadcast way, void* output, const CallStreams& streams);

}  // namespace axonn::kernels::cuda
