// An epilogue that stores each tile at its destination rank, and raises flags there.
#pragma once

#include "core/cuda/fused/flags.cuh"
#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/sm90/plans.h"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"

namespace axonn::kernels::sm90 {

// Wraps CUTLASS's TMA epilogue, with one set of descriptors per destination; the batch index
// selects the set. The cooperative kernel calls store_tail only at the end. So a tile is announced
// just before the next tile's stores, or at the end: by then its own stores are complete, or
// nearly so, and the math warps have not waited for them. The pingpong kernel has a tail after
// each tile. So a tile is announced there, while the other warpgroup runs its math. But this
// delays the other warpgroup's epilogue, which the kernel lets begin (math_wg_order_barrier) only
// after the tail. This costs time if a tile's math is shorter than its epilogue plus its way to
// the destination.
template <class Base, bool TailBehindEachTile>
class DepartureEpilogue : public Base {
 public:
  using LoadPipeline = typename Base::LoadPipeline;
  using LoadPipelineState = typename Base::LoadPipelineState;
  using StorePipeline = typename Base::StorePipeline;
  using StorePipelineState = typename Base::StorePipelineState;
  using TensorStorage = typename Base::TensorStorage;
  using TileShape = typename Base::CtaTileMNK;
  static constexpr int kBlockM = cute::size<0>(TileShape{});
  static constexpr int kBlockN = cute::size<1>(TileShape{});

  struct Arguments : Base::Arguments {
    DeparturePlan departures;
  };
  struct Params {
    typename Base::Params to[cuda::kMaxPeers];
    DeparturePlan departures;
    uint32_t tma_transaction_bytes;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& shape, const Arguments& arguments,
                                        void* workspace) {
    const auto [m, n, k, batches] = shape;
    Params params{};
    params.departures = arguments.departures;
    for (int rank = 0; rank < batches; ++rank) {
      typename Base::Arguments to = arguments;
      to.ptr_D = static_cast<typename Base::ElementD*>(arguments.departures.slots[rank]);
      params.to[rank] = Base::to_underlying_arguments(cute::make_shape(m, n, k, 1), to, workspace);
    }
    params.tma_transaction_bytes = params.to[0].tma_transaction_bytes;
    return params;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    for (int rank = 0; rank < params.departures.num_ranks; ++rank) {
      Base::prefetch_tma_descriptors(params.to[rank]);
    }
  }

  CUTLASS_DEVICE DepartureEpilogue(const Params& params, TensorStorage& shared)
      : Base(params.to[0], shared), params_(params) {}

  // All math warps that share the tile call this.
  template <class ProblemShape, class Tile, class TileCoord, class Accumulators, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state,
                            StorePipeline store_pipeline, StorePipelineState store_state,
                            ProblemShape shape, Tile tile, TileCoord coord,
                            Accumulators accumulators, TiledMma mma, int thread_idx,
                            TensorStorage& shared, int subtile = -1) {
    const auto [m, n, k, rank] = coord;
    const auto [size_m, size_n, size_k, batches] = shape;
    if constexpr (!TailBehindEachTile) announce_stored();
    Base base(params_.to[rank], shared);
    const auto next =
        base.store(load_pipeline, load_state, store_pipeline, store_state,
                   cute::make_shape(size_m, size_n, size_k, 1), tile, cute::make_coord(m, n, k, 0),
                   accumulators, mma, thread_idx, shared, subtile);
    const bool beyond = m * kBlockM >= size_m || n * kBlockN >= size_n;  // only fills a cluster
    if (thread_idx < cutlass::NumThreadsPerWarp && !beyond) stored_ = m * cuda::kMaxPeers + rank;
    return next;
  }

  // All math warps call this after their last tile, or after each tile.
  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state,
                                 StorePipeline store_pipeline, StorePipelineState store_state) {
    const auto next = Base::store_tail(load_pipeline, load_state, store_pipeline, store_state);
    announce_stored();
    return next;
  }

 private:
  CUTLASS_DEVICE void announce_stored() {
    if (stored_ < 0) return;
    announce(stored_ % cuda::kMaxPeers, stored_ / cuda::kMaxPeers);
    stored_ = -1;
  }

  // The warp that issued the tile's stores calls this; in pingpong, each warpgroup has such a warp.
  // The warp that counts the last tile of a chunk raises the chunk's flag at the destination.
  CUTLASS_DEVICE void announce(int rank, int row_of_tiles) const {
    // Waits until the stores are complete, not just read from shared memory.
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    // The stores went through the async proxy; the flag goes through the generic one.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();  // orders lane 0 after the lane that stored
    if (cutlass::canonical_lane_idx() != 0) return;
    const DeparturePlan& departures = params_.departures;
    int chunk = 0;
    while (departures.row_end[chunk] <= row_of_tiles) ++chunk;
    uint32_t* counter = departures.counters + rank * departures.chunks_per_shard + chunk;
    // The add acquires and releases: the last warp has seen all others' tiles when it raises the
    // flag, and by causality so has any thread that acquires the flag.
    if (cuda::add_acq_rel(counter, 1) + 1 != departures.num_tiles[chunk]) return;
    *counter = 0;  // for the next call, whose kernel starts after this one
    const int flag = departures.rank * departures.chunks_per_shard + chunk;
    cuda::store_release(cuda::flag_at(departures.pads[rank], flag), *departures.epoch);
  }

  const Params& params_;
  int stored_ = -1;  // row of tiles and rank of a tile that this warp has yet to announce
};

}  // namespace axonn::kernels::sm90
