// The tile scheduler of the sm_90 GEMMs: a persistent grid that works through a TileOrder.
#pragma once

#include "core/schedule/tile_order.h"
#include "cutlass/arch/arch.h"
#include "cutlass/detail/dependent_false.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace axonn::kernels::sm90 {

// Selects the scheduler in GemmUniversal.
struct OrderedTilesTag {};

// The unit of the order is a cluster of tiles. As in CUTLASS's scheduler, a work tile covers all of
// K and has one epilogue; only the order and the grid differ.
template <class ClusterShape>
class OrderedTiles : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr uint32_t kClusterM = cute::size<0>(ClusterShape{});
  static constexpr uint32_t kClusterN = cute::size<1>(ClusterShape{});

 public:
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Arguments : Base::Arguments {
    TileOrder order;
    bool along_columns = false;  // whether the order's `along` is the result's columns
  };
  struct Params : Base::Params {
    TileOrder order;
    uint32_t num_tiles;
    bool along_columns;
  };

  template <class ProblemShape, class TileShape>
  static Params to_underlying_arguments(ProblemShape, TileShape, ClusterShape,
                                        const cutlass::KernelHardwareInfo&,
                                        const Arguments& arguments, void* = nullptr, uint32_t = 1,
                                        uint32_t = 1) {
    Params params{};
    params.order = arguments.order;
    params.num_tiles = arguments.order.num_tiles();
    params.along_columns = arguments.along_columns;
    return params;
  }

  static bool can_implement(const Arguments& arguments) { return arguments.order.legal(); }

  // Returns as many clusters as fit hw_info.sm_count. The caller has bounded it, so that all of
  // them and everything that they wait for are resident together.
  template <class ProblemShape, class TileShape>
  static dim3 get_grid_shape(const Params& params, ProblemShape, TileShape, ClusterShape,
                             cutlass::KernelHardwareInfo hw_info, const Base::Arguments& = {}) {
    const auto most = static_cast<uint32_t>(hw_info.sm_count) / (kClusterM * kClusterN);
    const uint32_t clusters = params.num_tiles < most ? params.num_tiles : most;
    return dim3(kClusterM, kClusterN * clusters, 1);
  }

  CUTLASS_DEVICE explicit OrderedTiles(const Params& params)
      : params_(params), index_(blockIdx.y / kClusterN), step_(gridDim.y / kClusterN) {}

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) const {
    return get_current_work();
  }

  // The cooperative kernel calls these.
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class Pipeline, class PipelineState>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo tile, Pipeline&, PipelineState) {
    return fetch_next_work(tile);
  }

  // The pingpong kernel calls these. Each of its math warpgroups begins with one tile, and advances
  // by two.
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { index_ += count * step_; }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    if (index_ >= params_.num_tiles) return WorkTileInfo::invalid_work_tile();
    const TileOrder::Place at = params_.order.place(index_);
    const dim3 cta = cute::block_id_in_cluster();
    const uint32_t m = params_.along_columns ? at.across : at.along;
    const uint32_t n = params_.along_columns ? at.along : at.across;
    return {static_cast<int32_t>(m * kClusterM + cta.x),
            static_cast<int32_t>(n * kClusterN + cta.y), static_cast<int32_t>(at.batch), true};
  }

 private:
  const Params& params_;
  uint32_t index_;
  uint32_t step_;
};

}  // namespace axonn::kernels::sm90

namespace cutlass::gemm::kernel::detail {

template <class TileShape, class ClusterShape, uint32_t kStages>
struct TileSchedulerSelector<axonn::kernels::sm90::OrderedTilesTag, arch::Sm90, TileShape,
                             ClusterShape, kStages> {
  using Scheduler = axonn::kernels::sm90::OrderedTiles<ClusterShape>;
};

}  // namespace cutlass::gemm::kernel::detail
