// A GEMM that starts on what has arrived and sends what is finished, as plain data: no Torch, no
// CUTLASS, no CUDA headers, so that CPU tests cover what is derived from it.
//
//     D [m, n] = A [m, k] @ B [k, n], accumulated in fp32
//
// Operands may arrive in chunks, each announced by a flag. The result may leave, to one rank after
// the other; a flag there announces each chunk.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda/fused/flags.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/data_type.h"
#include "core/schedule/chunk_plan.h"

namespace axonn::kernels::cuda {

inline constexpr int32_t kMaxPeers = 8;  // in a node of a DGX: descriptors are kernel parameters
inline constexpr int32_t kMaxChunks = kMaxPeers * comm::kMaxChunksPerShard;
static_assert(kMaxChunks <= 32, "a lane for each");

// The rows of the smallest chunk: a whole number of clusters of tiles, for every config that is
// built. It is a constant, because ranks that multiply with different columns may choose different
// configs.
inline constexpr int64_t kChunkRows = 256;

// Chunks of rows that leave end at multiples of these rows, but for the last one. They are whole
// tiles of every config for sm_90, and a constant for the same reason as kChunkRows.
inline constexpr int64_t kPartRows = 128;

// Returns the number of chunks per shard, which is the same on all ranks.
constexpr int32_t chunks_per_shard(int64_t shard_rows) {
  return static_cast<int32_t>(
      std::clamp<int64_t>(shard_rows / kChunkRows, 1, comm::kMaxChunksPerShard));
}

// The alignment that TMA requires of addresses, and of the distance between rows.
inline constexpr int64_t kLoadBytes = 16;

// Which dimension of the product arrives in chunks.
enum class Arriving : int32_t {
  kNothing,
  kRows,     // of A: an activation gathered over x or y
  kColumns,  // of B: a weight gathered over z, forward
  kInner,    // K, of one operand, whose other is there: a weight gathered over z, dgrad
};

struct Arrivals {
  Arriving dim = Arriving::kNothing;
  comm::ChunkPlan plan{};           // of that dimension
  int32_t rank = 0;                 // whose own shard is already there, and is worked on first
  const void* pad = nullptr;        // this rank's flags, by SignalLayout::flag(0, chunk)
  const uint32_t* epoch = nullptr;  // of this call, in device memory: graphs replay
  SpinLimit limit{};
};

// The rows of D leave, an equal share for each destination; those for rank r go to slots[r].
struct Departures {
  int32_t num_ranks = 0;  // 0: D stays
  int32_t rank = 0;       // this rank, whose own rows come last
  int32_t chunks_per_shard = 1;
  void* slots[kMaxPeers] = {};      // this rank's staging slot at each, [m / num_ranks, n]
  void* pads[kMaxPeers] = {};       // their flags, by SignalLayout::flag(0, {this rank, chunk})
  uint32_t* counters = nullptr;     // kMaxChunks zeros on this device, which are left zeros
  const uint32_t* epoch = nullptr;  // of this call, in device memory
};

// Returns what arrives while a gather's product is computed. Along K nothing does, as no tile ends
// before all has arrived.
constexpr ArrivingChunks arriving_chunks(Arriving dim, const comm::ChunkPlan& plan,
                                         int64_t row_bytes, const Link& link) {
  if (dim != Arriving::kRows && dim != Arriving::kColumns) return {};
  const auto bytes = static_cast<double>(comm::ceil_div(plan.count, plan.num_chunks()) * row_bytes);
  return {.count = plan.num_chunks(),
          .own = plan.chunks_per_shard,
          .each_us = bytes / (link.copy_gbps * 1e3) + link.chunk_us,
          .columns = dim == Arriving::kColumns};
}

// Returns what leaves to so many ranks: all rows but the own ones, which come last.
constexpr LeavingRows leaving_rows(int64_t num_ranks, const Link& link) {
  return {1 - 1 / static_cast<double>(num_ranks), link.store_gbps};
}

struct FusedGemm {
  const void* a;
  const void* b;
  void* d;  // null if the rows leave
  int64_t m, n, k;
  int64_t lda, ldb, ldd;  // elements between rows (columns, where transposed) of what is stored
  // A is stored as [m, k], or as [k, m] if transposed; B as [k, n], or as [n, k] if transposed.
  bool a_transposed, b_transposed;
  DataType dtype;
  const void* bias = nullptr;      // [n], added to every row; only if D stays
  const void* residual = nullptr;  // as d, added; only if D stays
  Arrivals arrivals{};
  Departures departures{};
};

}  // namespace axonn::kernels::cuda
