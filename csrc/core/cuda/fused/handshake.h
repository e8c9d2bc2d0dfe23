// Functions with which ranks that share device memory begin and end a call, and wait for what peers
// deliver. The device code runs on any architecture.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fused/flags.h"
#include "core/cuda/fused/fused_gemm.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::kernels::cuda {

// What the ranks of a group have mapped of each other: for each rank a workspace and a pad of
// flags. A call may overwrite a peer's workspace once that peer has ended the call before.
struct Peers {
  int32_t rank = 0;
  int32_t num_ranks = 0;
  void* workspaces[kMaxPeers] = {};
  void* pads[kMaxPeers] = {};  // kPadBytes each, zero at first
  // A second address of all workspaces: what is stored there at an offset is stored at that offset
  // in each of them. It is null if the GPUs, or the links between them, have no multicast.
  void* multicast = nullptr;
  bool apart = false;         // no rank maps another's, so calls begin and end without signals
  bool alone = false;         // no other rank is on this device, so a copy to a peer leaves it
  uint32_t* epoch = nullptr;  // on this device: calls begun, in step on all ranks
  // The same number in pinned host memory. The copy engine takes it from there for flags on this
  // device, and for all flags where ranks share a device: a copy within a device may be made by a
  // kernel, for which a grid that fills the device leaves no room.
  uint32_t* epoch_to_push = nullptr;
  // The epoch of the call that is being enqueued, as the host has counted it. It is valid only if
  // `host_counts`: within a call, on memory that no graph has captured, and behind no call that was
  // cut short (WorkspaceMemory).
  uint32_t host_epoch = 0;
  bool host_counts = false;
  // A bit for each rank whose flags the queue of a stream can write: this one, and peers that have
  // seen such a write arrive (write_probe.h).
  uint32_t queue_writes = 0;
  uint32_t* counters = nullptr;  // on this device: kMaxChunks zeros for a GEMM, as many for a sum
  SpinLimit limit{};
};

// The flags of a pad are those of what is gathered or summed, then, for each rank, the flag that
// says that this rank has ended its call.
inline constexpr int64_t kDoneFlags = comm::kNumSignals - kMaxPeers;
inline constexpr int64_t kPadBytes = comm::kNumSignals * comm::kSignalStride;

// Loads the kernels of this file onto the current device.
cudaError_t load_handshake();

// Waits until all peers, unless apart, have ended the call before, then counts this call. Raises
// this rank's own `own_chunks` flags of a gather, because its shard is in its workspace before the
// next kernel starts.
cudaError_t begin_call(const Peers& peers, int32_t own_chunks, cudaStream_t stream);

// Raises this rank's flags of a phase at all ranks, because what was enqueued before has been
// delivered.
cudaError_t raise_chunks(const Peers& peers, const comm::SignalLayout& layout, int32_t phase,
                         cudaStream_t stream);

// Waits for the chunks of all shards (the addends of all sources) of a phase.
cudaError_t await_chunks(const Peers& peers, const comm::SignalLayout& layout, int32_t phase,
                         cudaStream_t stream);

// Waits for this rank's own flag among those that say that a call has ended.
cudaError_t await_own(const Peers& peers, cudaStream_t stream);

// Tells all peers, unless apart, that this rank reads nothing more of what they wrote in this call.
cudaError_t end_call(const Peers& peers, cudaStream_t stream);

}  // namespace axonn::kernels::cuda
