#include "core/cuda/sm90/gemm.cuh"

namespace axonn::kernels::sm90 {

std::vector<Instance> gemm_f16_tn() {
  return instances_of<cutlass::half_t, false, true>(DataType::kFloat16);
}

}  // namespace axonn::kernels::sm90
