// CUTLASS's GEMMs that every run of the machine's tests checks.
// Makes CUTLASS's kernels wait for the kernels that they may overlap.
#define CUTLASS_ENABLE_GDC_FOR_SM90
#include "gpu_machine/runtime/cutlass_gemm.cuh"

namespace axonn::gpu_machine::testing {

std::vector<CutlassGemm> daily_cutlass_gemms() {
  return {Instance<cutlass::bfloat16_t, Rows, Columns, Extents<128, 64, 64>, Extents<2, 1, 1>,
                   Cooperative>::as("bf16_tn_cooperative_2x1"),
          Instance<cutlass::half_t, Columns, Columns, Extents<64, 64, 64>, Extents<1, 1, 1>,
                   Pingpong>::as("f16_nn_pingpong_1x1")};
}

}  // namespace axonn::gpu_machine::testing
