// The sm_90 GEMM: CUTLASS's warp-specialised mainloop and TMA epilogue, with our own tile order,
// waits and destinations. Each *_sm90.cu file builds some of its instances.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/sm90/arrival_mainloop.cuh"
#include "core/cuda/sm90/departure_epilogue.cuh"
#include "core/cuda/sm90/instances.h"
#include "core/cuda/sm90/tile_scheduler.cuh"
#include "core/gemm/sm90_tiles.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace axonn::kernels::sm90 {

// The tile at position Index of kSm90Tiles, in CUTLASS's form.
template <std::size_t Index>
struct Tiles {
  static constexpr LaunchConfig kListed = config_of(kSm90Tiles[Index], kSm90ElementBytes);
  using Tile = cute::Shape<cute::Int<kListed.block_m>, cute::Int<kListed.block_n>,
                           cute::Int<kListed.block_k>>;
  using Cluster = cute::Shape<cute::Int<kListed.cluster_m>, cute::Int<kListed.cluster_n>, cute::_1>;
};

// If `Departs`, the rows of D leave. Otherwise D stays, and a bias and a residual can be added.
template <class Element, bool ATransposed, bool BTransposed, class Tiles, bool Departs>
struct Gemm {
  using Tile = typename Tiles::Tile;
  using Cluster = typename Tiles::Cluster;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  // Layouts of A as [m, k] and of B as [k, n].
  using LayoutA = std::conditional_t<ATransposed, ColumnMajor, RowMajor>;
  using LayoutB = std::conditional_t<BTransposed, ColumnMajor, RowMajor>;
  static constexpr int kAlignment = 16 / sizeof(Element);  // required by TMA

  static constexpr bool kPingpong = Tiles::kListed.schedule == Schedule::kPingpong;
  using MainloopSchedule =
      std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  // The addend's type if D stays. Rows that leave are part of a sum, and get no addend.
  using Source = std::conditional_t<Departs, void, Element>;
  using Fusion = std::conditional_t<
      Departs, cutlass::epilogue::fusion::LinearCombination<Element, float, void, float>,
      cutlass::epilogue::fusion::LinCombPerColBias<Element, float, Element, Element, float>>;
  using PlainEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, RowMajor, kAlignment,
      Element, RowMajor, kAlignment, EpilogueSchedule, Fusion>::CollectiveOp;
  using Epilogue =
      std::conditional_t<Departs, DepartureEpilogue<PlainEpilogue, kPingpong>, PlainEpilogue>;
  using Mainloop = ArrivalMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, kAlignment, Element,
      LayoutB, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCount<static_cast<int>(Tiles::kListed.num_stages)>,
      MainloopSchedule>::CollectiveOp>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, OrderedTilesTag>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static constexpr LaunchConfig kConfig{
      .block_m = cute::size<0>(Tile{}),
      .block_n = cute::size<1>(Tile{}),
      .block_k = cute::size<2>(Tile{}),
      .num_stages = Mainloop::DispatchPolicy::Stages,
      .num_math_warps = Kernel::MaxThreadsPerBlock / 32 - kSm90ProducerWarps,
      .num_producer_warps = kSm90ProducerWarps,
      .cluster_m = cute::size<0>(Cluster{}),
      .cluster_n = cute::size<1>(Cluster{}),
      .schedule = Tiles::kListed.schedule,
  };
  static_assert(sizeof(Element) == kSm90ElementBytes);
  static_assert(
      static_cast<int64_t>(sizeof(typename Kernel::SharedStorage)) <= kSm90.shared_bytes_per_block,
      "kSm90Tiles: num_stages must fit beside the tile on its way out, as CUTLASS has it");
  static_assert(kConfig.num_math_warps == Tiles::kListed.num_math_warps);
  static_assert(Kernel::NumMMAThreads / 32 == math_warps_per_tile(Tiles::kListed));

  static cudaError_t load() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, cutlass::device_kernel<Kernel>);
  }

  static cudaError_t launch(const cuda::FusedGemm& gemm, const LaunchConfig& config,
                            cudaStream_t stream) {
    typename Device::Arguments arguments{};
    const int batches = Departs ? gemm.departures.num_ranks : 1;
    const int m = static_cast<int>(gemm.m / batches);
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {m, static_cast<int>(gemm.n), static_cast<int>(gemm.k), batches};
    arguments.hw_info.sm_count = static_cast<int>(config.num_ctas);
    set_operands(arguments.mainloop, gemm, m);
    set_result(arguments.epilogue, gemm);
    const TileGrid grid = tile_grid(gemm, config);
    arguments.scheduler.order = grid.order;
    arguments.scheduler.along_columns = grid.along_columns;

    Device device;
    if (Device::can_implement(arguments) != cutlass::Status::kSuccess ||
        device.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess ||
        !are_encoded(device.params(), batches)) {
      return cudaErrorInvalidValue;
    }
    const auto status = device.run(stream);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    return status == cutlass::Status::kSuccess ? cudaSuccess : cudaErrorLaunchFailure;
  }

 private:
  // The batches of A are the destinations' rows. B is a single matrix: only batch 0 is read, and
  // only the descriptor needs a batch stride.
  static void set_operands(typename Mainloop::Arguments& mainloop, const cuda::FusedGemm& gemm,
                           int m) {
    mainloop.ptr_A = static_cast<const Element*>(gemm.a);
    mainloop.ptr_B = static_cast<const Element*>(gemm.b);
    if constexpr (ATransposed) {
      mainloop.dA = {cute::_1{}, gemm.lda, m};
    } else {
      mainloop.dA = {gemm.lda, cute::_1{}, m * gemm.lda};
    }
    if constexpr (BTransposed) {
      mainloop.dB = {gemm.ldb, cute::_1{}, gemm.ldb * gemm.n};
    } else {
      mainloop.dB = {cute::_1{}, gemm.ldb, gemm.ldb * gemm.k};
    }
    mainloop.arrivals = arrival_plan(gemm, kConfig);
  }

  // Returns whether the driver has encoded every descriptor. If it rejects one, CUTLASS leaves
  // zeros and goes on: it only asserts, which NDEBUG disables.
  static bool are_encoded(const typename Kernel::Params& params, int batches) {
    if (!is_encoded(params.mainloop.tma_load_a) || !is_encoded(params.mainloop.tma_load_b)) {
      return false;
    }
    if constexpr (Departs) {
      return std::all_of(params.epilogue.to, params.epilogue.to + batches,
                         [](const auto& to) { return is_encoded(to.tma_store_d); });
    } else {
      return is_encoded(params.epilogue.tma_load_c) && is_encoded(params.epilogue.tma_store_d);
    }
  }

  template <class Copy>
  static bool is_encoded(const Copy& copy) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(copy.get_tma_descriptor());
    return std::any_of(bytes, bytes + sizeof(cute::TmaDescriptor),
                       [](unsigned char byte) { return byte != 0; });
  }

  static void set_result(typename Epilogue::Arguments& epilogue, const cuda::FusedGemm& gemm) {
    epilogue.thread.alpha = 1;
    epilogue.thread.beta = 0;
    epilogue.dD = {gemm.ldd, cute::_1{}, 0};
    epilogue.dC = epilogue.dD;
    if constexpr (Departs) {
      epilogue.ptr_C = nullptr;
      epilogue.departures = departure_plan(gemm, kConfig);
    } else {
      // The descriptor needs an address even if nothing is read.
      epilogue.ptr_C = static_cast<const Element*>(gemm.residual ? gemm.residual : gemm.d);
      epilogue.ptr_D = static_cast<Element*>(gemm.d);
      epilogue.thread.beta = gemm.residual ? 1 : 0;
      epilogue.thread.bias_ptr = static_cast<const Element*>(gemm.bias);
    }
  }
};

template <class Element, bool ATransposed, bool BTransposed, class Tiles, bool Departs>
constexpr Instance instance_of(DataType dtype) {
  using Built = Gemm<Element, ATransposed, BTransposed, Tiles, Departs>;
  return {dtype, ATransposed, BTransposed, Departs, Built::kConfig, &Built::launch, &Built::load};
}

// Returns two instances of every tile in the list: one whose result stays, and one whose result
// leaves.
template <class Element, bool ATransposed, bool BTransposed, std::size_t... Index>
std::vector<Instance> instances_of(DataType dtype, std::index_sequence<Index...>) {
  return {instance_of<Element, ATransposed, BTransposed, Tiles<Index>, false>(dtype)...,
          instance_of<Element, ATransposed, BTransposed, Tiles<Index>, true>(dtype)...};
}

template <class Element, bool ATransposed, bool BTransposed>
std::vector<Instance> instances_of(DataType dtype) {
  return instances_of<Element, ATransposed, BTransposed>(dtype,
                                                         std::make_index_sequence<kNumSm90Tiles>());
}

}  // namespace axonn::kernels::sm90
