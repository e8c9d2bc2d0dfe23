// A GEMM that starts on chunks as they arrive and sends chunks as they finish, as plain data: no
// Torch, CUTLASS or CUDA headers, so that CPU tests cover everything derived from it.
//
//     D [m, n] = A [m, k] @ B [k, n], accumulated in fp32
//
// Operands may arrive in chunks; a flag announces each chunk. The result may leave, to one rank
// after the other; a flag at the destination announces each chunk.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda/fused/flags.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/data_type.h"
#include "core/schedule/chunk_plan.h"

namespace axonn::kernels::cuda {

inline constexpr int32_t kMaxPeers = 8;  // GPUs per DGX node; parameters hold a descriptor for each
inline constexpr int32_t kMaxChunks = kMaxPeers * comm::kMaxChunksPerShard;
static_assert(kMaxChunks <= 32, "a lane for each");

// Minimum rows of a chunk: a whole number of clusters of tiles, for every config that is built. A
// constant, because ranks whose GEMMs have different numbers of columns may choose different
// configs.
inline constexpr int64_t kChunkRows = 256;

// Chunks of rows that leave, except the last one, end at multiples of kPartRows: whole tiles for
// every sm_90 config. It is a constant for the same reason as kChunkRows.
inline constexpr int64_t kPartRows = 128;

// Returns the number of chunks per shard, which is the same on all ranks.
constexpr int32_t chunks_per_shard(int64_t shard_rows) {
  return static_cast<int32_t>(
      std::clamp<int64_t>(shard_rows / kChunkRows, 1, comm::kMaxChunksPerShard));
}

// The alignment, in bytes, that TMA requires of addresses and row strides.
inline constexpr int64_t kLoadBytes = 16;

// The GEMM dimension that arrives in chunks.
enum class Arriving : int32_t {
  kNothing,
  kRows,     // of A: an activation gathered over x or y
  kColumns,  // of B: a weight gathered over z, forward
  kInner,    // K of one operand; the other is local: a weight gathered over z, dgrad
};

struct Arrivals {
  Arriving dim = Arriving::kNothing;
  comm::ChunkPlan plan{};           // of that dimension
  int32_t rank = 0;                 // its own shard is already there and comes first
  const void* pad = nullptr;        // this rank's flags, indexed by SignalLayout::flag(0, chunk)
  const uint32_t* epoch = nullptr;  // of this call; in device memory because graphs replay
  SpinLimit limit{};
};

// The rows of D leave in equal shares, one per destination; the rows for rank r go to slots[r].
struct Departures {
  int32_t num_ranks = 0;  // 0: D stays on this rank
  int32_t rank = 0;       // this rank, whose own rows come last
  int32_t chunks_per_shard = 1;
  void* slots[kMaxPeers] = {};      // this rank's staging slot at each rank, [m / num_ranks, n]
  void* pads[kMaxPeers] = {};       // flags at each, by SignalLayout::flag(0, {this rank, chunk})
  uint32_t* counters = nullptr;     // kMaxChunks zeros on this device; zeros again afterwards
  const uint32_t* epoch = nullptr;  // of this call, in device memory
};

// Returns the chunks that arrive while a gather's product is computed. Along K there are none,
// because no tile ends before everything has arrived.
constexpr ArrivingChunks arriving_chunks(Arriving dim, const comm::ChunkPlan& plan,
                                         int64_t row_bytes, const Link& link) {
  if (dim != Arriving::kRows && dim != Arriving::kColumns) return {};
  const auto bytes = static_cast<double>(comm::ceil_div(plan.count, plan.num_chunks()) * row_bytes);
  return {.count = plan.num_chunks(),
          .own = plan.chunks_per_shard,
          .each_us = bytes / (link.copy_gbps * 1e3) + link.chunk_us,
          .columns = dim == Arriving::kColumns};
}

// Returns the rows that leave for num_ranks ranks: all but this rank's own, which come last.
constexpr LeavingRows leaving_rows(int64_t num_ranks, const Link& link) {
  return {1 - 1 / static_cast<double>(num_ranks), link.store_gbps};
}

struct FusedGemm {
  const void* a;
  const void* b;
  void* d;  // null if the rows leave
  int64_t m, n, k;
  int64_t lda, ldb, ldd;  // elements between stored rows (columns of a transposed matrix)
  // A is stored as [m, k], or as [k, m] if transposed; B as [k, n], or as [n, k] if transposed.
  bool a_transposed, b_transposed;
  DataType dtype;
  const void* bias = nullptr;      // [n], added to every row; only if D stays
  const void* residual = nullptr;  // laid out like d, added to it; only if D stays
  Arrivals arrivals{};
  Departures departures{};
};

}  // namespace axonn::kernels::cuda
