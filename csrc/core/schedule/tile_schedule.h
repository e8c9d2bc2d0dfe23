// Maps a linear work index to an output tile, and to the chunks that the tile waits for or
// completes. CTA c of the C CTAs of a persistent kernel takes the indices c, c + C, ... . These
// increase, and tiles are numbered in the order in which chunks arrive (or must leave), so no CTA
// waits for a late chunk while it could work on an early one.
//
// The dimension that is split over the group is called "along"; it is the rows or the columns of
// the output. The other dimension ("across") runs fastest, so that all tiles of a chunk come before
// those of the next.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"
#include "core/schedule/chunk_plan.h"

namespace axonn::kernels {

enum class Along : int32_t { kRows, kColumns };

// The position of an output tile, in tiles.
struct Tile {
  int64_t m;
  int64_t n;
};

AXONN_HOST_DEVICE constexpr Tile tile_of(Along dim, int64_t along, int64_t across) {
  return dim == Along::kRows ? Tile{along, across} : Tile{across, along};
}

// Return how many of `count` work indices CTA `cta` of `num_ctas` takes, and the one at a turn.
AXONN_HOST_DEVICE constexpr int64_t num_turns(int64_t count, int64_t cta, int64_t num_ctas) {
  return count <= cta ? 0 : comm::ceil_div(count - cta, num_ctas);
}
AXONN_HOST_DEVICE constexpr int64_t index_of_turn(int64_t turn, int64_t cta, int64_t num_ctas) {
  return cta + turn * num_ctas;
}

// A gather feeds a GEMM: the rows of A (kRows) or the columns of B (kColumns) arrive in chunks.
// There is one grid of tiles over the gathered matrix. It starts at the first tile entirely after
// the start of this rank's shard; a tile that straddles that start comes last, as its front part
// arrives last. So the step at which a tile can run never decreases from one index to the next.
struct GatherTiles {
  comm::ChunkPlan plan;
  int64_t rank;
  int64_t block;         // size of a tile along the gathered dimension
  int64_t tiles_across;  // tiles of the other dimension
  Along dim = Along::kRows;

  AXONN_HOST_DEVICE constexpr int64_t tiles_along() const {
    return comm::ceil_div(plan.count, block);
  }
  AXONN_HOST_DEVICE constexpr int64_t num_tiles() const { return tiles_along() * tiles_across; }

  AXONN_HOST_DEVICE constexpr int64_t along(int64_t index) const {
    const int64_t first = comm::ceil_div(plan.shard(rank).begin, block);
    return (first + index / tiles_across) % tiles_along();
  }
  AXONN_HOST_DEVICE constexpr Tile tile(int64_t index) const {
    return tile_of(dim, along(index), index % tiles_across);
  }
  // Returns the tile's positions along the gathered dimension.
  AXONN_HOST_DEVICE constexpr comm::Range positions(int64_t index) const {
    const int64_t begin = along(index) * block;
    return {begin, begin + block < plan.count ? begin + block : plan.count};
  }
  // Return the chunks that the tile waits for, and the one of them that an in-order transport
  // delivers last.
  AXONN_HOST_DEVICE constexpr comm::ChunkSpan needed(int64_t index) const {
    return plan.needed(positions(index));
  }
  AXONN_HOST_DEVICE constexpr comm::ChunkIndex last_delivered(int64_t index) const {
    return plan.last_delivered(rank, positions(index));
  }
};

// The blocks of a dimension. They start anew at each shard, so that none straddles two shards.
// Block `local` of shard s begins `local * block` after the start of s.
struct ShardBlocks {
  comm::ChunkPlan plan;
  int64_t block;

  struct Place {
    int64_t shard;
    int64_t local;
  };

  // A block lies in one chunk only if chunk edges are block edges.
  AXONN_HOST_DEVICE constexpr bool legal() const {
    return plan.legal() && block >= 1 && plan.tile % block == 0;
  }
  AXONN_HOST_DEVICE constexpr int64_t in_shard(int64_t shard) const {
    return comm::ceil_div(plan.shard(shard).size(), block);
  }
  // The first count % num_shards shards are one element longer than the others.
  AXONN_HOST_DEVICE constexpr int64_t before_shard(int64_t shard) const {
    const int64_t longer = plan.count % plan.num_shards;
    const int64_t of_longer = shard < longer ? shard : longer;
    return of_longer * in_shard(0) + (shard - of_longer) * in_shard(plan.num_shards - 1);
  }
  AXONN_HOST_DEVICE constexpr int64_t count() const { return before_shard(plan.num_shards); }

  // Returns the place of block `index` in the order that begins with shard `first`.
  AXONN_HOST_DEVICE constexpr Place place(int64_t first, int64_t index) const {
    int64_t position = before_shard(first) + index;
    if (position >= count()) position -= count();
    const int64_t longer = plan.count % plan.num_shards;
    const int64_t in_longer = before_shard(longer);
    if (position < in_longer) return {position / in_shard(0), position % in_shard(0)};
    const int64_t size = in_shard(plan.num_shards - 1);
    return {longer + (position - in_longer) / size, (position - in_longer) % size};
  }
  AXONN_HOST_DEVICE constexpr comm::Range positions(Place place) const {
    const comm::Range whole = plan.shard(place.shard);
    const int64_t begin = whole.begin + place.local * block;
    return {begin, begin + block < whole.end ? begin + block : whole.end};
  }
};

// A GEMM feeds a scatter: the tiles for destination rank + 1 come first and this rank's own last,
// so that peers get their addends early and no peer waits for rows that this rank keeps. Tiles
// start anew at each destination, because its staging slot is a separate matrix.
struct ScatterTiles {
  comm::ChunkPlan plan;
  int64_t rank;
  int64_t block;         // size of a tile along the scattered dimension; divides plan.tile
  int64_t tiles_across;  // tiles of the other dimension
  Along dim = Along::kRows;

  AXONN_HOST_DEVICE constexpr ShardBlocks blocks() const { return {plan, block}; }
  AXONN_HOST_DEVICE constexpr int64_t num_tiles() const { return blocks().count() * tiles_across; }

  AXONN_HOST_DEVICE constexpr ShardBlocks::Place place(int64_t index) const {
    return blocks().place(comm::own_last(rank, plan.num_shards, 0), index / tiles_across);
  }
  // Tiles are numbered along the dimension through all shards. If shards are ragged, a tile's
  // number is not its position / block.
  AXONN_HOST_DEVICE constexpr Tile tile(int64_t index) const {
    const ShardBlocks::Place at = place(index);
    return tile_of(dim, blocks().before_shard(at.shard) + at.local, index % tiles_across);
  }
  AXONN_HOST_DEVICE constexpr comm::Range positions(int64_t index) const {
    return blocks().positions(place(index));
  }
  // Returns the chunk that contains the tile; its `shard` is the rank to signal.
  AXONN_HOST_DEVICE constexpr comm::ChunkIndex chunk(int64_t index) const {
    return plan.at(positions(index).begin);
  }
  // Returns how many tiles must be stored before the chunk may be signalled.
  AXONN_HOST_DEVICE constexpr int64_t tiles_in(comm::ChunkIndex index) const {
    return comm::ceil_div(plan.chunk(index).size(), block) * tiles_across;
  }
};

}  // namespace axonn::kernels
