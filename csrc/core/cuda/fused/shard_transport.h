// Who brings a gather's rows to the GEMM that waits for them. The GEMM looks at flags in its own
// memory and does not know which of these raises them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/handshake.h"

namespace axonn::kernels::cuda {

// The matrix that is gathered, as it is stored: rows, a shard of consecutive ones on each rank.
struct GatheredRows {
  const void* shard;  // this rank's rows, without gaps
  int64_t row_bytes;
  comm::ChunkPlan plan;  // of all rows
  bool is_a;             // the operand that they are; else B
};

class ShardTransport {
 public:
  virtual ~ShardTransport() = default;

  // Whether ranks write into each other's workspaces, and so must know when they may.
  virtual bool writes_to_peers() const = 0;

  // Enqueues, on a stream of its own, what brings every chunk of the other shards to its place in
  // the workspace of each rank that this one delivers to, with the epoch's flag behind each chunk.
  // Waits for nothing that a GEMM which fills its grid keeps from running.
  virtual void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) = 0;

  // Enqueues, behind the GEMM, what bounds the wait for deliver's stream, where that waits for
  // peers.
  virtual void confirm(const Peers& peers, cudaStream_t stream) {
    (void)peers;
    (void)stream;
  }
};

// The copy engine writes this rank's rows into each peer's workspace. Needs no SM, and GPUs that
// reach each other's memory.
class CopyEnginePush : public ShardTransport {
 public:
  bool writes_to_peers() const override { return true; }
  void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) override;
};

// The copy engine fetches the rows from wherever they are: those of pinned host memory cross a link
// of known speed, which stands in for peers where there is one GPU.
class CopyEnginePull : public ShardTransport {
 public:
  explicit CopyEnginePull(const void* const* shards) : shards_(shards) {}

  bool writes_to_peers() const override { return false; }
  void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) override;

 private:
  const void* const* shards_;  // of all ranks
};

}  // namespace axonn::kernels::cuda
