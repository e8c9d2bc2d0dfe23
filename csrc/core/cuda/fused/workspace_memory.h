// When a workspace gets other memory, and what then happens in which order.
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

  // Notes that a call begins which uses the memory, and counts it. If a graph captures it, the
  // graph goes on with this memory. From then on the host does not know the epoch, because replays
  // count, too. Nor does it know the epoch behind a call that was cut short, since nobody tells
  // whether the device has counted that one.
  void enter_call(bool is_captured, Peers& peers) {
    captured_ = captured_ || is_captured;
    was_cut_short_ = was_cut_short_ || in_call_;
    in_call_ = true;
    peers.host_counts = !captured_ && !was_cut_short_;
    ++peers.host_epoch;
  }
  // Notes that all of the call has been enqueued.
  void leave_call(Peers& peers) { in_call_ = peers.host_counts = false; }

  // Replaces the memory by one with at least so many bytes for the workspace. The host waits for
  // all calls first, because peers may still write what this rank has asked for. Then it calls
  // renew(size, keep), which gets `size` bytes and sets the peers' addresses; `keep` says that a
  // graph uses the old memory, which must then be kept, and which goes on with epochs of its own.
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

  bool is_captured() const { return captured_; }                  // a graph uses the memory
  bool graphs_use_any() const { return captured_ || kept_ > 0; }  // this memory or earlier ones
  // Notes that the memory, which no graph uses, is gone.
  void release() { bytes_ = 0; }

 private:
  int64_t page_bytes_;     // of device memory
  int kept_ = 0;           // earlier memories that graphs use
  bool captured_ = false;  // whether a graph uses the memory
  bool in_call_ = false;   // whether a call has begun and not ended
  bool was_cut_short_ = false;
  int64_t bytes_ = 0;
};

}  // namespace axonn::kernels::cuda
