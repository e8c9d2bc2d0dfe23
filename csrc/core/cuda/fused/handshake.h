// How ranks that share device memory begin and end a call, and wait for deliveries from peers. The
// device code runs on any architecture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/flags.h"
#include "core/cuda/fused/fused_gemm.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::kernels::cuda {

// The memory of a group's ranks, as mapped by this rank: a workspace and a pad of flags for each. A
// call may overwrite a peer's workspace once that peer has ended the previous call.
struct Peers {
  int32_t rank = 0;
  int32_t num_ranks = 0;
  void* workspaces[kMaxPeers] = {};
  void* pads[kMaxPeers] = {};  // kPadBytes each, initially zero
  // A second address of all workspaces: a store at an offset from it reaches that offset in every
  // workspace. Null if the GPUs, or the links between them, have no multicast.
  void* multicast = nullptr;
  bool apart = false;         // no rank maps another's memory, so calls need no signals
  bool alone = false;         // no other rank uses this device, so a copy to a peer leaves it
  uint32_t* epoch = nullptr;  // on this device: number of calls begun, equal on all ranks
  // The same number in pinned host memory. The copy engine reads it from there for flags on this
  // device and, if ranks share a device, for all flags: a kernel may make a copy within a device,
  // and a grid that fills the device leaves no room for that kernel.
  uint32_t* epoch_to_push = nullptr;
  // The epoch of the call that is being enqueued, as counted by the host. It is valid only if
  // `host_counts`: within a call, on memory that no graph has captured, and if no earlier call was
  // cut short (WorkspaceMemory).
  uint32_t host_epoch = 0;
  bool host_counts = false;
  // One bit per rank whose flags a stream's queue can write: this rank, and the peers that have
  // seen such a write arrive (write_probe.h).
  uint32_t queue_writes = 0;
  uint32_t* counters = nullptr;  // on this device: kMaxChunks zeros for a GEMM, as many for a sum
  SpinLimit limit{};
};

// A pad holds the flags for what is gathered or summed, followed by one flag per rank that says
// that the rank has ended its call.
inline constexpr int64_t kDoneFlags = comm::kNumSignals - kMaxPeers;
inline constexpr int64_t kPadBytes = comm::kNumSignals * comm::kSignalStride;

// Loads the kernels of this file onto the current device.
cudaError_t load_handshake();

// Waits until all peers, unless apart, have ended the previous call, then counts this call. Raises
// this rank's own `own_chunks` flags of a gather, because its shard is in its workspace before the
// next kernel starts.
cudaError_t begin_call(const Peers& peers, int32_t own_chunks, cudaStream_t stream);

// Raises this rank's flags of a phase at all ranks. They announce that the work enqueued before has
// been delivered.
cudaError_t raise_chunks(const Peers& peers, const comm::SignalLayout& layout, int32_t phase,
                         cudaStream_t stream);

// Waits for the chunks of all shards (the addends of all sources) of a phase.
cudaError_t await_chunks(const Peers& peers, const comm::SignalLayout& layout, int32_t phase,
                         cudaStream_t stream);

// Waits for this rank's own flag among the kDoneFlags, which push_flag raises.
cudaError_t await_own(const Peers& peers, cudaStream_t stream);

// Tells all peers, unless apart, that this rank has read everything that they wrote in this call.
cudaError_t end_call(const Peers& peers, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
