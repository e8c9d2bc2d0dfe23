// Instances of CUTLASS's GEMMs for sm_90, made as in its example 49: with the collective builders
// and the universal adapter, and nothing from this project. Source: CUTLASS 4.2,
// examples/49_hopper_gemm_with_collective_builder.
#pragma once

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "gpu_machine/runtime/cutlass_gemm.h"

namespace axonn::gpu_machine::testing {

using Rows = cutlass::layout::RowMajor;
using Columns = cutlass::layout::ColumnMajor;
template <int kM, int kN, int kK>
using Extents = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;

// How a kernel's warps share the work.
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
  using Scheduler = cutlass::gemm::PersistentScheduler;
  static constexpr int kAlignment = 8;  // elements: 16 bytes, as TMA needs
};
struct Pingpong : Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
// One tile per CTA.
struct NotPersistent : Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecialized;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
  using Scheduler = void;
};
struct StreamK : Cooperative {
  using Scheduler = cutlass::gemm::StreamKScheduler;
};
// Without TMA: loads by cp.async that arrive at mbarriers.
struct CopyAsync : Cooperative {
  using Mainloop = cutlass::gemm::KernelCpAsyncWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::NoSmemWarpSpecialized;
  static constexpr int kAlignment = 4;
};

template <typename Element, typename LayoutA, typename LayoutB, typename Tile, typename Cluster,
          typename Schedule>
struct Instance {
  static constexpr int kAlignment = Schedule::kAlignment;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Rows, kAlignment,
      Element, Rows, kAlignment, typename Schedule::Epilogue>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, kAlignment, Element,
      LayoutB, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule::Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, typename Schedule::Scheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static cudaError_t run(const CutlassProblem& problem, cudaStream_t stream) {
    const auto [m, n, k] = cute::make_tuple(problem.m, problem.n, problem.k);
    const auto on_rows = [m = m, n = n](auto stride) {
      return cutlass::make_cute_packed_stride(stride, cute::make_shape(m, n, 1));
    };
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<const Element*>(problem.a),
         cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, cute::make_shape(m, k, 1)),
         static_cast<const Element*>(problem.b),
         cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, cute::make_shape(n, k, 1))},
        {{1.0f, 1.0f},
         static_cast<const Element*>(problem.c),
         on_rows(typename Kernel::StrideC{}),
         static_cast<Element*>(problem.d),
         on_rows(typename Kernel::StrideD{})}};
    arguments.hw_info.sm_count = problem.num_ctas;
    Gemm gemm;
    if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess ||
        Gemm::get_workspace_size(arguments) > kCutlassWorkspaceBytes ||
        gemm.initialize(arguments, problem.workspace, stream) != cutlass::Status::kSuccess) {
      return cudaErrorInvalidValue;
    }
    return gemm.run(stream, nullptr, problem.overlaps) == cutlass::Status::kSuccess
               ? cudaGetLastError()
               : cudaErrorLaunchFailure;
  }

  static CutlassGemm as(const char* name) {
    return {name,
            std::is_same_v<Element, cutlass::half_t>,
            std::is_same_v<LayoutA, Rows>,
            std::is_same_v<LayoutB, Rows>,
            kAlignment,
            &run};
  }
};

}  // namespace axonn::gpu_machine::testing
