// Defines how the shards of a gather or scatter are cut into chunks, the unit of signals and waits,
// and the order in which chunks are visited. Every rank computes the same edges from the same
// sizes. An edge never depends on timing, because the bits of a library's products change with the
// size of their operands.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"
#include "core/schedule/partition.h"

namespace axonn::comm {

// One chunk of one shard. `shard` is the rank that owns it: the source of a gather, the destination
// of a scatter.
struct ChunkIndex {
  int64_t shard;
  int64_t chunk;
  friend AXONN_HOST_DEVICE constexpr bool operator==(const ChunkIndex& a, const ChunkIndex& b) {
    return a.shard == b.shard && a.chunk == b.chunk;
  }
};

// The chunks from `first` to `last`, inclusive, by ordinal.
struct ChunkSpan {
  int64_t first;
  int64_t last;
};

// Cuts the dimension that is split over the group (rows, columns or K) into shards, and each shard
// into chunks. `count` is the dimension's total length over all ranks. Edges lie at multiples of
// `tile` from the start of their shard, so all ranks cut alike; the last chunk takes the ragged
// tail. A shard with fewer tiles than chunks has empty chunks, which are legal and are signalled
// like others.
struct ChunkPlan {
  int64_t count;
  int64_t num_shards;  // the group's size; 1 if each rank has its own addend of the whole
  int64_t chunks_per_shard = 1;
  int64_t tile = 1;

  AXONN_HOST_DEVICE constexpr bool legal() const {
    return count >= 0 && num_shards >= 1 && chunks_per_shard >= 1 && tile >= 1;
  }
  AXONN_HOST_DEVICE constexpr int64_t num_chunks() const { return num_shards * chunks_per_shard; }

  AXONN_HOST_DEVICE constexpr Range shard(int64_t index) const {
    return part_of(count, num_shards, index);
  }

  // Returns the positions of a chunk in the whole dimension.
  AXONN_HOST_DEVICE constexpr Range chunk(ChunkIndex index) const {
    const Range whole = shard(index.shard);
    const Range tiles = part_of(ceil_div(whole.size(), tile), chunks_per_shard, index.chunk);
    const int64_t begin = tiles.begin * tile;
    const int64_t end = tiles.end * tile;
    return {whole.begin + (begin < whole.size() ? begin : whole.size()),
            whole.begin + (end < whole.size() ? end : whole.size())};
  }

  // Returns the chunk that contains a position.
  AXONN_HOST_DEVICE constexpr ChunkIndex at(int64_t position) const {
    const int64_t index = part_at(count, num_shards, position);
    const Range whole = shard(index);
    return {index, part_at(ceil_div(whole.size(), tile), chunks_per_shard,
                           (position - whole.begin) / tile)};
  }

  // Convert between a chunk and its number in the order of positions.
  AXONN_HOST_DEVICE constexpr int64_t ordinal(ChunkIndex index) const {
    return index.shard * chunks_per_shard + index.chunk;
  }
  AXONN_HOST_DEVICE constexpr ChunkIndex from_ordinal(int64_t ordinal) const {
    return {ordinal / chunks_per_shard, ordinal % chunks_per_shard};
  }

  // Returns the chunk that a gather on `rank` visits at `step` of num_chunks(): its own shard
  // first, then that of rank + 1, and so on. Transports deliver and consumers visit in this order.
  AXONN_HOST_DEVICE constexpr ChunkIndex gather_visit(int64_t rank, int64_t step) const {
    return {own_first(rank, num_shards, step / chunks_per_shard), step % chunks_per_shard};
  }
  // Returns the step at which a gather on `rank` visits a chunk: the inverse of gather_visit.
  AXONN_HOST_DEVICE constexpr int64_t gather_step(int64_t rank, ChunkIndex index) const {
    return (index.shard - rank + num_shards) % num_shards * chunks_per_shard + index.chunk;
  }
  // Returns the chunk that a scatter on `rank` visits at `step`: rank + 1's first, its own last.
  AXONN_HOST_DEVICE constexpr ChunkIndex scatter_visit(int64_t rank, int64_t step) const {
    return {own_last(rank, num_shards, step / chunks_per_shard), step % chunks_per_shard};
  }

  // Returns the chunks that a non-empty range of positions touches. It is always correct to wait
  // for each of them, whichever transport signals them.
  AXONN_HOST_DEVICE constexpr ChunkSpan needed(Range positions) const {
    return {ordinal(at(positions.begin)), ordinal(at(positions.end - 1))};
  }

  // Returns the chunk of such a range that a gather on `rank` delivers last. It is correct to wait
  // for this chunk only if one in-order transport (a copy stream) delivers all of them, so that it
  // implies the others. Delivery follows positions, except that it wraps before the rank's own
  // shard.
  AXONN_HOST_DEVICE constexpr ChunkIndex last_delivered(int64_t rank, Range positions) const {
    const int64_t own = shard(rank).begin;
    const bool wraps = positions.begin < own && own < positions.end;
    return at(wraps ? own - 1 : positions.end - 1);
  }
};

// With this many chunks, the first tiles start after a quarter of a shard. More chunks would only
// add signals.
inline constexpr int64_t kMaxChunksPerShard = 4;

// The costs that modelled_us and chunks_that_pay weigh. The caller measures or guesses the times.
// They must be equal on all ranks, or ranks would cut differently.
struct PipelineCosts {
  int64_t num_workers;   // tiles that run concurrently: SMs, or threads of a CPU
  int64_t tiles_across;  // tiles of the dimension that is not cut
  double tile_us;        // one tile, over all of its K
  double chunk_us;       // fixed cost of a chunk: a launch, a signal, a wait
  double shard_us;       // transfer of one shard
  // Whether one kernel works through all chunks. Otherwise each chunk is a separate library call,
  // whose last wave of tiles leaves workers idle.
  bool persistent;
};

// Models the time of a gather whose chunks feed a product as they arrive: this rank's own shard
// first, then the peers' shards one after the other over one link. A scatter is the same pipeline
// run backwards, and takes the same time.
double modelled_us(const ChunkPlan& plan, const PipelineCosts& costs);

// Returns the number of chunks per shard, 1 to kMaxChunksPerShard, with the lowest modelled time;
// the smallest number if several tie. `plan.chunks_per_shard` is ignored.
int64_t chunks_that_pay(ChunkPlan plan, const PipelineCosts& costs);

}  // namespace axonn::comm
