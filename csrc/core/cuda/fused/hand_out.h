// How an all-reduce gives every rank the rows that one rank has added up: the ways there are, which
// are legal and which to take. Plain host code without CUDA headers, so that CPU tests cover it.
#pragma once

#include <cstdint>

#include "core/cuda/fused/fused_gemm.h"
#include "core/numeric/data_type.h"

namespace axonn::kernels::cuda {

enum class HandOut : int32_t {
  kCopyEngine,  // one copy to each peer, behind the sum
  kPeerStores,  // the kernel that adds stores each row at every rank
  kMulticast,   // it stores each row once; the switch between the GPUs stores it at every rank
};

struct HandOutProblem {
  int32_t num_ranks;
  int64_t slot_bytes;  // of the rows that one rank adds up
  bool has_multicast;  // the workspaces have a multicast address
};

inline constexpr int64_t kStoreBytes = 16;

// Up to here peer stores are taken for faster than copies, which cost an engine about 2 us each to
// start: what a link of NVLink carries meanwhile. A guess, until it is measured.
inline constexpr int64_t kPeerStoreBytes = 1 << 20;

// Why a way cannot be taken; null: it can. Ranks may take different ways: all store the same bytes
// at the same place, and raise the same flags.
constexpr const char* why_no_hand_out(HandOut way, const HandOutProblem& problem) {
  if (way == HandOut::kCopyEngine) return nullptr;
  if (problem.slot_bytes % kStoreBytes != 0) {
    return "a rank's rows must be a multiple of 16 bytes, to be stored as they are added up";
  }
  if (way == HandOut::kMulticast && !problem.has_multicast) {
    return "the memory of these ranks has no multicast address";
  }
  return nullptr;
}

// A rank's rows reach every rank in the same number of bytes either way. Multicast sends them once
// where the others send them num_ranks - 1 times, but also back to their owner: between two ranks
// that saves nothing.
constexpr HandOut choose_hand_out(const HandOutProblem& problem) {
  if (problem.num_ranks > 2 && why_no_hand_out(HandOut::kMulticast, problem) == nullptr) {
    return HandOut::kMulticast;
  }
  const bool few = (problem.num_ranks - 1) * problem.slot_bytes <= kPeerStoreBytes;
  return few && why_no_hand_out(HandOut::kPeerStores, problem) == nullptr ? HandOut::kPeerStores
                                                                          : HandOut::kCopyEngine;
}

// What an architecture's kernel adds up and stores at every rank: `bytes`, a multiple of
// kStoreBytes at addresses that are too, of bfloat16 or float16. In the order of sources, in fp32:
// the bits of reduce_slots (reduce.h).
struct SumToAll {
  const void* sources[kMaxPeers] = {};
  void* destinations[kMaxPeers] = {};  // every rank's, in the order of stores; or the multicast one
  int32_t num_ranks;                   // sources, and destinations unless multicast
  bool multicast;
  DataType dtype;
  int64_t bytes;
};

}  // namespace axonn::kernels::cuda
