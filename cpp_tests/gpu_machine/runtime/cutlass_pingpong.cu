#include "gpu_machine/runtime/cutlass_gemm.cuh"

namespace axonn::gpu_machine::testing {

std::vector<CutlassGemm> pingpong_cutlass_gemms() {
  return {
      Instance<cutlass::bfloat16_t, Rows, Columns, Extents<64, 128, 64>, Extents<1, 2, 1>,
               Pingpong>::as("bf16_tn_pingpong_1x2"),
      Instance<cutlass::half_t, Columns, Rows, Extents<64, 64, 64>, Extents<2, 1, 1>, Pingpong>::as(
          "f16_nt_pingpong_2x1"),
      Instance<cutlass::bfloat16_t, Columns, Columns, Extents<64, 64, 64>, Extents<2, 1, 1>,
               NotPersistent>::as("bf16_nn_not_persistent_2x1")};
}

}  // namespace axonn::gpu_machine::testing
