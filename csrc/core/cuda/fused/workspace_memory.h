// Decides when a workspace gets new memory, and the order of the steps that this takes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/cuda/fused/call_order.h"
#include "core/cuda/fused/peer_state.h"
#include "core/cuda/fused/workspace_size.h"

namespace axonn::kernels::cuda {

static_assert(kFrontBytes == kPadBytes + kStateBytes, "workspace_size.h needs no CUDA headers");

class WorkspaceMemory {
 public:
  explicit WorkspaceMemory(int64_t page_bytes = kPageBytes) : page_bytes_(page_bytes) {}

  int64_t bytes() const { return bytes_; }  // of the workspace

  // Notes and counts the beginning of a call that uses the memory. If a graph captures the call,
  // the graph keeps using this memory. From then on the host does not know the epoch, because
  // replays count, too. Nor does it know the epoch after a call that was cut short, because it
  // cannot tell whether the device has counted that call.
  void enter_call(bool is_captured, Peers& peers) {
    captured_ = captured_ || is_captured;
    was_cut_short_ = was_cut_short_ || in_call_;
    in_call_ = true;
    peers.host_counts = !captured_ && !was_cut_short_;
    ++peers.host_epoch;
  }
  // Notes that the whole call has been enqueued.
  void leave_call(Peers& peers) { in_call_ = peers.host_counts = false; }

  // Gets new memory with at least `bytes` for the workspace. First the host waits for all calls,
  // because peers may still write what this rank has asked for. Then calls renew(size, keep), which
  // allocates `size` bytes and sets the peers' addresses. `keep` says that a graph uses the old
  // memory, which must then be kept and keeps its own epochs.
  template <typename Grow>
  void grow(int64_t bytes, const CallOrder& order, const PinnedState& pinned, Peers& peers,
            Grow&& renew) {
    order.synchronize();
    if (captured_ && kept_ + 1 == PinnedState::kMostMemories) {
      throw std::runtime_error("CUDA graphs use " + std::to_string(kept_ + 1) +
                               " memories of this workspace; no more can be kept for them");
    }
    const int64_t size = memory_bytes(bytes, kFrontBytes, page_bytes_);
    renew(size, captured_);
    if (captured_) ++kept_;
    captured_ = in_call_ = was_cut_short_ = false;
    peers.epoch_to_push = pinned.epoch_to_push(kept_);
    peers.host_epoch = 0;
    peers.host_counts = false;
    bytes_ = size - kFrontBytes;
  }

  bool is_captured() const { return captured_; }                  // a graph uses this memory
  bool graphs_use_any() const { return captured_ || kept_ > 0; }  // this memory or earlier ones
  // Notes that the memory has been freed. No graph may use it.
  void release() { bytes_ = 0; }

 private:
  int64_t page_bytes_;     // of device memory
  int kept_ = 0;           // number of earlier allocations that graphs use
  bool captured_ = false;  // whether a graph uses the memory
  bool in_call_ = false;   // whether a call has begun but not ended
  bool was_cut_short_ = false;
  int64_t bytes_ = 0;
};

}  // namespace axonn::kernels::cuda
