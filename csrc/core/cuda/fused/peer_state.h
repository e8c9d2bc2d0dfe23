// The state that a rank holds on its device for fused calls, in addition to workspaces.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/check.h"
#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/stream.h"
#include "core/symmetric/epoch_flag.h"

namespace axonn::kernels::cuda {

// A pad's flags are followed by the rank's own epoch, a word per rank for write_probes, and the
// rank's own counters. Each part has its own cache lines.
inline constexpr int64_t kStateBytes = 1024;
inline constexpr int64_t kProbeOffset = kStateBytes / 4;
static_assert(kMaxPeers * sizeof(uint32_t) <= kStateBytes / 4, "the probes must fit");
static_assert(2 * kMaxChunks * sizeof(uint32_t) <= kStateBytes / 2, "the counters must fit");

// Sets the pad of peers.rank, which is initially zero, and the pointers into it.
inline void set_own_pad(Peers& peers, void* pad) {
  auto* state = static_cast<char*>(pad) + kPadBytes;
  peers.pads[peers.rank] = pad;
  peers.queue_writes |= uint32_t{1} << peers.rank;
  peers.epoch = reinterpret_cast<uint32_t*>(state);
  peers.counters = reinterpret_cast<uint32_t*>(state + kStateBytes / 2);
}

// A rank's pinned host memory. It holds the record of a kernel's failed wait, and the epochs that
// the copy engine pushes.
class PinnedState {
 public:
  // Maximum number of allocations of a workspace that graphs can use. Growth makes at most
  // 192 (workspace_size.h), but a workspace that was released starts small again.
  static constexpr int kMostMemories = 256;

  PinnedState() {
    AXONN_CUDA_CHECK(
        cudaHostAlloc(reinterpret_cast<void**>(&state_), sizeof(State), cudaHostAllocPortable));
    *state_ = {};
  }
  ~PinnedState() { (void)cudaFreeHost(state_); }
  PinnedState(const PinnedState&) = delete;
  PinnedState& operator=(const PinnedState&) = delete;

  SpinFailure& failure() const { return state_->failure; }
  // Each allocation that graphs use counts its own epochs, because the graphs go on with it after
  // the workspace has moved to another one.
  uint32_t* epoch_to_push(int memory = 0) const { return &state_->epochs[memory].value; }

 private:
  struct alignas(comm::kFlagAlignment) Epoch {
    uint32_t value;
  };
  struct State {
    SpinFailure failure;
    Epoch epochs[kMostMemories];
  };
  State* state_ = nullptr;
};

// The stream on which a rank's shard is pushed to its peers, and the events that order it.
// Nothing else uses the stream: other work on it might wait for kernels that in turn wait for the
// pushes.
class CopyLane {
 public:
  // Created on the current device.
  CopyLane() = default;

  CallStreams behind(cudaStream_t compute) const {
    return {compute, stream_.get(), begun_.get(), delivered_.get()};
  }

 private:
  axonn::cuda::HighPriorityStream stream_;
  axonn::cuda::Event begun_, delivered_;
};

}  // namespace axonn::kernels::cuda
