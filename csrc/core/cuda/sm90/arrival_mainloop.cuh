// A mainloop whose producer warp waits for the chunks that it is about to load.
#pragma once

#include "core/cuda/fused/flags.cuh"
#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/sm90/plans.h"
#include "cutlass/gemm/collective/collective_mma.hpp"

namespace axonn::kernels::sm90 {

using cuda::Arriving;

// Adds waits to the loads of a CUTLASS mainloop; its math does not change. The rows of A, the
// columns of B or the K dimension arrive in chunks. Along K, a tile's sum begins with this rank's
// own shard and follows the order of arrival, which depends on the rank and never on timing.
template <class Base>
struct ArrivalMainloop : Base {
  using PipelineState = typename Base::PipelineState;
  using MainloopPipeline = typename Base::MainloopPipeline;
  using TensorStorage = typename Base::TensorStorage;
  static constexpr int kBlockM = cute::size<0>(typename Base::TileShape{});
  static constexpr int kBlockN = cute::size<1>(typename Base::TileShape{});
  static constexpr int kBlockK = cute::size<2>(typename Base::TileShape{});

  struct Arguments : Base::Arguments {
    ArrivalPlan arrivals;
  };
  struct Params : Base::Params {
    ArrivalPlan arrivals;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& shape, const Arguments& arguments,
                                        void* workspace) {
    return {Base::to_underlying_arguments(shape, arguments, workspace), arguments.arrivals};
  }

  // All lanes of the producer warp call this; the base elects one of them.
  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState state,
                           const cute::tuple<TensorA, TensorB>& inputs, const BlockCoord& coord,
                           KTileIterator k_tile, int k_tile_count, int thread_idx,
                           uint32_t block_rank, TensorStorage& shared) {
    const auto tiles = of_batch(inputs, cute::get<3>(coord));
    const auto [m, n, k, batch] = coord;
    const auto in_batch = cute::make_coord(m, n, k, 0);
    const auto load_k = [&](int begin, int count) {
      const auto k_tiles = cute::shape<3>(cute::get<0>(tiles));
      const auto from = cute::make_coord_iterator(cute::idx2crd(begin, k_tiles), k_tiles);
      Base::load(params, pipeline, state, tiles, in_batch, from, count, thread_idx, block_rank,
                 shared);
      state.advance(count);
    };
    const ArrivalPlan& arrivals = params.arrivals;
    if (arrivals.dim == Arriving::kInner) {
      load_in_order_of_arrival(arrivals, k_tile_count, load_k);
      return;
    }
    if (arrivals.dim == Arriving::kRows) await_tile(arrivals, m * kBlockM, kBlockM);
    if (arrivals.dim == Arriving::kColumns) await_tile(arrivals, n * kBlockN, kBlockN);
    load_k(0, k_tile_count);
  }

 private:
  // Returns A's tiles of one batch, as batch 0, and B, which all batches share. The batches are the
  // destinations of the result's rows.
  template <class TensorA, class TensorB>
  CUTLASS_DEVICE static auto of_batch(const cute::tuple<TensorA, TensorB>& inputs, int batch) {
    using cute::_;
    const auto a = cute::get<0>(inputs)(_, _, _, _, batch);
    const auto one = cute::Layout<cute::_1, cute::_0>{};
    return cute::make_tuple(cute::make_tensor(a.data(), cute::append(a.layout(), one)),
                            cute::get<1>(inputs));
  }

  CUTLASS_DEVICE void await_tile(const ArrivalPlan& arrivals, int begin, int size) {
    if (arrived_ == arrivals.all() || begin >= arrivals.count) return;  // beyond: fills a cluster
    const int end = begin + size < arrivals.count ? begin + size : arrivals.count;
    await(arrivals, ArrivalPlan::first(chunk_at(arrivals, end - 1) + 1) &
                        ~ArrivalPlan::first(chunk_at(arrivals, begin)));
  }

  // Loads the K tiles, from the first one entirely in this rank's shard around to the one before
  // it. Loads as many at a time as one wait allows.
  template <class LoadK>
  CUTLASS_DEVICE void load_in_order_of_arrival(const ArrivalPlan& arrivals, int num_tiles,
                                               LoadK&& load_k) {
    int tile = arrivals.first_block;
    for (int left = num_tiles; left > 0;) {
      int stop = num_tiles;
      if (arrived_ != arrivals.all()) {
        const int last = (tile + 1) * kBlockK - 1;
        const int chunk = chunk_at(arrivals, last < arrivals.count ? last : arrivals.count - 1);
        await_tile(arrivals, tile * kBlockK, kBlockK);
        stop = arrivals.stop(chunk, tile, kBlockK, num_tiles);
      }
      const int count = stop - tile < left ? stop - tile : left;
      load_k(tile, count);
      left -= count;
      tile = stop == num_tiles ? 0 : stop;
    }
  }

  // Returns the chunk that contains a position. Each lane looks at one chunk.
  CUTLASS_DEVICE static int chunk_at(const ArrivalPlan& arrivals, int position) {
    const int lane = cutlass::canonical_lane_idx();
    const bool before = lane < arrivals.num_chunks && arrivals.chunk_end[lane] <= position;
    return __popc(__ballot_sync(0xffffffff, before));
  }

  // Each lane waits for one chunk. Pairs with the sender's release: push_flag after a copy, or
  // store_release.
  CUTLASS_DEVICE void await(const ArrivalPlan& arrivals, uint32_t wanted) {
    wanted &= ~arrived_;
    if (wanted == 0) return;
    const int lane = cutlass::canonical_lane_idx();
    if ((wanted >> lane & 1) != 0) {
      cuda::await_rows(cuda::flag_at(arrivals.pad, lane), *arrivals.epoch, arrivals.limit,
                       {arrivals.chunks_per_shard, lane});
    }
    __syncwarp();  // orders every lane's acquire before the elected lane's loads
    // The acquires order generic accesses; the loads that follow go through the async proxy.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    arrived_ |= wanted;
  }

  uint32_t arrived_ = 0;
};

}  // namespace axonn::kernels::sm90
