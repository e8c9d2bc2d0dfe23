// Delivers a gather's rows through NCCL, for ranks that cannot access each other's memory, such as
// ranks on different hosts.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "core/cuda/fused/shard_transport.h"
#include "core/ranks/key_value_store.h"

namespace axonn::kernels::cuda {

// Each chunk is a send and a receive, issued as one group; push_flag then raises the flag in this
// rank's own pad.
//
// Unlike the copy engine, NCCL's kernels need SMs while the GEMM waits for them. So the GEMM must
// leave kMostCtas SMs free for them, and as many for every other kernel that waits for a peer at
// the same time. Otherwise one of two such kernels may hold the SMs that the other needs, while on
// the peer it is the other way round.
class NcclChunks : public ShardTransport {
 public:
  // The maximum number of CTAs of a chunk's kernel. It is a power of two, because NCCL rounds the
  // number of channels for sends up to one.
  static constexpr int32_t kMostCtas = 8;

  // Creates a separate communicator for the ranks, on the current device; collective. Throws
  // CommunicationError if the ranks do not meet within the timeout. `key` is used once.
  NcclChunks(int64_t rank, int64_t num_ranks, comm::KeyValueStore& store, const std::string& key,
             std::chrono::duration<double> timeout);
  ~NcclChunks() override;
  NcclChunks(const NcclChunks&) = delete;
  NcclChunks& operator=(const NcclChunks&) = delete;

  bool writes_to_peers() const override { return false; }
  // Throws CommunicationError if NCCL rejects a chunk, and always after a call was given up.
  void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) override;
  // NCCL matches sends and receives by their order. After a call that this rank has not finished,
  // peers would take its next chunk for one of that call.
  void give_up() noexcept override { gave_up_ = true; }
  // A send waits for the peer that receives it. This waits for the sends in a kernel of one thread,
  // within the time budget.
  void confirm(const Peers& peers, cudaStream_t stream) override;

 private:
  struct Message {
    const void* sent;
    int64_t to;
    void* received;
    int64_t from;
    int64_t bytes;  // size of each buffer
  };
  void exchange(const Message& message, cudaStream_t stream);

  const std::chrono::duration<double> timeout_;
  std::mutex mutex_;  // NCCL takes one call at a time
  std::atomic<bool> gave_up_ = false;
  ncclComm_t comm_ = nullptr;
};

}  // namespace axonn::kernels::cuda
