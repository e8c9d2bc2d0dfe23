#include "core/cuda/sm90/gemm.cuh"

namespace axonn::kernels::sm90 {

std::vector<Instance> gemm_f16_nt() {
  return instances_of<cutlass::half_t, true, false>(DataType::kFloat16);
}

}  // namespace axonn::kernels::sm90
