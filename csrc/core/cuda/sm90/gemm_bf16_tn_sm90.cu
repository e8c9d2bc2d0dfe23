#include "core/cuda/sm90/gemm.cuh"

namespace axonn::kernels::sm90 {

std::vector<Instance> gemm_bf16_tn() {
  return instances_of<cutlass::bfloat16_t, false, true>(DataType::kBFloat16);
}

}  // namespace axonn::kernels::sm90
