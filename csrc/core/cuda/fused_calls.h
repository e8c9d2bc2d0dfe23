// One rank's part of an op whose GEMM starts on what has arrived, or sends what is finished: what
// it enqueues, and where. Nothing waits on the host, and nothing depends on host state that changes
// from call to call, so a CUDA graph replays it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused_gemm.h"
#include "core/cuda/handshake.h"

namespace axonn::kernels::cuda {

// An architecture's GEMMs, from the extension module that holds them.
struct GemmBackend {
  const char* (*why_unsupported)(const FusedGemm& gemm);
  cudaError_t (*launch)(const FusedGemm& gemm, const LaunchConfig& config, cudaStream_t stream);
  cudaError_t (*load)();
};

// Loads every kernel of a fused call onto the current device. To be called before the first: CUDA
// loads a kernel at its first launch otherwise, which may wait for kernels that run, and those may
// wait for what this rank has yet to enqueue.
void load_kernels(const GemmBackend& backend);

struct CallStreams {
  cudaStream_t compute;
  cudaStream_t copy;  // of the copy engine, for pushes
  cudaEvent_t begun;  // events of this rank, without timing; used again in every call
  cudaEvent_t delivered;
};

// The matrix that is gathered, as it is stored: rows, a shard of consecutive ones on each rank.
struct GatheredRows {
  const void* shard;  // this rank's rows, without gaps
  int64_t row_bytes;
  comm::ChunkPlan plan;  // of all rows
  bool is_a;             // the operand that they are; else B
};

// Chunks per shard, the same on all ranks.
int32_t chunks_per_shard(int64_t shard_rows);

int64_t gather_workspace_bytes(const GatheredRows& rows);
int64_t reduce_scatter_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks);
int64_t all_reduce_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks);

// D = the product with the gathered matrix, whose rows are rows of A, columns of B or lie along K:
// `arriving`. The caller has left that operand null: it is the workspace.
//
// Copies are pushed by the copy engine, each followed by its flag: the epoch, copied from device
// memory behind it on the same stream.
void all_gather_gemm(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, Arriving arriving, const GatheredRows& rows,
                     const CallStreams& streams);

// The same with rows that the copy engine pulls, from wherever `shards` are: those of pinned host
// memory cross a link of known speed, which stands in for peers where there is one GPU.
void pulled_gather_gemm(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                        FusedGemm gemm, const GatheredRows& rows, const void* const* shards,
                        const CallStreams& streams);

// output [m / num_ranks, n] = this rank's rows of the sum over ranks of A @ B, added in the order
// of ranks in fp32.
void gemm_reduce_scatter(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         FusedGemm gemm, void* output, const CallStreams& streams);

// output [m, n] = the sum over ranks of A @ B: a reduce-scatter whose sums are pushed to all.
void gemm_all_reduce(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, void* output, const CallStreams& streams);

}  // namespace axonn::kernels::cuda
