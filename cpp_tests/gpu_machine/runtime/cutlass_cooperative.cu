#include "gpu_machine/runtime/cutlass_gemm.cuh"

namespace axonn::gpu_machine::testing {

std::vector<CutlassGemm> cooperative_cutlass_gemms() {
  return {Instance<cutlass::bfloat16_t, Columns, Rows, Extents<128, 128, 64>, Extents<1, 1, 1>,
                   Cooperative>::as("bf16_nt_cooperative_1x1"),
          Instance<cutlass::half_t, Rows, Columns, Extents<128, 64, 64>, Extents<1, 2, 1>,
                   Cooperative>::as("f16_tn_cooperative_1x2")};
}

CutlassGemm copy_async_cutlass_gemm() {
  return Instance<cutlass::half_t, Rows, Columns, Extents<128, 64, 64>, Extents<1, 1, 1>,
                  CopyAsync>::as("f16_tn_copy_async_1x1");
}

}  // namespace axonn::gpu_machine::testing
