#include "gpu_machine/runtime/cutlass_gemm.cuh"

namespace axonn::gpu_machine::testing {

std::vector<CutlassGemm> stream_k_cutlass_gemms() {
  return {
      Instance<cutlass::bfloat16_t, Rows, Columns, Extents<128, 64, 64>, Extents<1, 1, 1>,
               StreamK>::as("bf16_tn_stream_k_1x1"),
      Instance<cutlass::half_t, Rows, Columns, Extents<128, 64, 64>, Extents<2, 1, 1>, StreamK>::as(
          "f16_tn_stream_k_2x1")};
}

}  // namespace axonn::gpu_machine::testing
