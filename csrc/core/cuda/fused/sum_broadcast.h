// The ways in which an all-reduce can give every rank the rows that one rank has summed: which of
// them are legal, and which one to use. This is plain host code without CUDA headers, so that CPU
// tests cover it.
#pragma once

#include <cstdint>

#include "core/cuda/fused/fused_gemm.h"
#include "core/numeric/data_type.h"

namespace axonn::kernels::cuda {

enum class SumBroadcast : int32_t {
  kCopyEngine,  // one copy to each peer, after the sum
  kPeerStores,  // the summing kernel stores each row at every rank
  kMulticast,   // it stores each row once; the switch between the GPUs stores it at every rank
  kSwitch,      // the switch also sums, in its own order, so bits may differ
};

struct SumBroadcastProblem {
  int32_t num_ranks;
  int64_t slot_bytes;      // of the rows that one rank sums
  bool has_multicast;      // the workspaces have a multicast address
  bool has_kernel = true;  // there is a kernel that stores its sums at every rank
  bool any_order = false;  // bits may depend on the way, and differ from call to call
};

inline constexpr int64_t kStoreBytes = 16;

// Up to this size, peer stores are assumed to be faster than copies. Starting a copy takes an
// engine about 2 us, in which NVLink carries about this many bytes. A guess, until measured.
inline constexpr int64_t kPeerStoreBytes = 1 << 20;

// Returns why a way cannot be used, or null if it can. Ranks may use different ways, because all of
// them store the same bytes in the same place and raise the same flags. The exception is kSwitch,
// which all ranks must use together.
constexpr const char* why_no_sum_broadcast(SumBroadcast way, const SumBroadcastProblem& problem) {
  if (way == SumBroadcast::kCopyEngine) return nullptr;
  if (!problem.has_kernel) return "only kernels for sm_90 store at every rank what they add up";
  if (problem.slot_bytes % kStoreBytes != 0) {
    return "a rank's rows must be a multiple of 16 bytes, to be stored as they are added up";
  }
  const bool multicasts = way == SumBroadcast::kMulticast || way == SumBroadcast::kSwitch;
  if (multicasts && !problem.has_multicast) {
    return "the memory of these ranks has no multicast address";
  }
  return nullptr;
}

// With each way, a rank receives the same number of bytes for its peers' rows. Multicast sends rows
// once instead of num_ranks - 1 times, but also sends them back to their owner, so it saves nothing
// between two ranks. If the switch sums, a rank's rows enter each GPU once, instead of once as
// addends and once as sums.
constexpr SumBroadcast choose_sum_broadcast(const SumBroadcastProblem& problem) {
  if (problem.any_order && problem.num_ranks > 2 &&
      why_no_sum_broadcast(SumBroadcast::kSwitch, problem) == nullptr) {
    return SumBroadcast::kSwitch;
  }
  if (problem.num_ranks > 2 && why_no_sum_broadcast(SumBroadcast::kMulticast, problem) == nullptr) {
    return SumBroadcast::kMulticast;
  }
  const bool few = (problem.num_ranks - 1) * problem.slot_bytes <= kPeerStoreBytes;
  return few && why_no_sum_broadcast(SumBroadcast::kPeerStores, problem) == nullptr
             ? SumBroadcast::kPeerStores
             : SumBroadcast::kCopyEngine;
}

// Returns whether the switch would sum if the memory had a multicast address. That is known only
// once the workspaces exist, and their size depends on a product that is described earlier.
constexpr bool may_add_in_switch(SumBroadcastProblem problem) {
  problem.has_multicast = true;
  return choose_sum_broadcast(problem) == SumBroadcast::kSwitch;
}

// Arguments of an architecture's kernel that sums and stores the sums at every rank: `bytes` of
// bfloat16 or float16. `bytes` and all addresses are multiples of kStoreBytes. The kernel adds in
// the order of sources, in fp32, and gives the bits of reduce_slots (reduce.h).
struct SumToAll {
  const void* sources[kMaxPeers] = {};
  void* destinations[kMaxPeers] = {};  // every rank's, in the order of stores; or the multicast one
  int32_t num_ranks;                   // number of sources, and of destinations unless multicast
  bool multicast;
  DataType dtype;
  int64_t bytes;
};

}  // namespace axonn::kernels::cuda
