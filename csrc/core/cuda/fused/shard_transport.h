// Transports that bring a gather's rows to the GEMM that waits for them. The GEMM polls flags in
// its own memory and does not know which transport raises them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/handshake.h"

namespace axonn::kernels::cuda {

// The gathered matrix, stored by rows; each rank holds a shard of consecutive rows.
struct GatheredRows {
  const void* shard;  // this rank's rows, contiguous
  int64_t row_bytes;
  comm::ChunkPlan plan;  // of all rows
  bool is_a;             // whether the rows are operand A; else B
};

class ShardTransport {
 public:
  virtual ~ShardTransport() = default;

  // Returns whether ranks write into each other's workspaces. If so, they signal when they may.
  virtual bool writes_to_peers() const = 0;

  // Enqueues, on a separate stream, the work that brings every chunk of the other shards to its
  // place in the workspace of each rank that this one delivers to, and that sets the chunk's flag
  // to the epoch afterwards. The work must not wait for anything that a GEMM which fills its grid
  // could keep from running.
  virtual void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) = 0;

  // Called instead of deliver, or after deliver has thrown, if a call is cut short on this rank
  // only: the peers' deliveries of that call then get no answer.
  virtual void give_up() noexcept {}

  // If deliver's stream waits for peers, enqueues a bounded wait for it, after the GEMM.
  virtual void confirm(const Peers& peers, cudaStream_t stream) {
    (void)peers;
    (void)stream;
  }
};

// The copy engine writes this rank's rows into each peer's workspace. This needs no SM, but the
// GPUs must be able to access each other's memory.
class CopyEnginePush : public ShardTransport {
 public:
  bool writes_to_peers() const override { return true; }
  void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) override;
};

// The copy engine fetches the rows from wherever they are. Rows in pinned host memory cross a link
// of known speed, so they can stand in for peers on a machine with one GPU.
class CopyEnginePull : public ShardTransport {
 public:
  explicit CopyEnginePull(const void* const* shards) : shards_(shards) {}

  bool writes_to_peers() const override { return false; }
  void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) override;

 private:
  const void* const* shards_;  // of all ranks
};

}  // namespace axonn::kernels::cuda
