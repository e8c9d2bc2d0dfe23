// A GEMM for tests of the host code: it waits for flags, stores at peers and raises their flags
// like the GEMMs for sm_90, but multiplies one element after the other.
#pragma once

#include "core/cuda/fused/fused_calls.h"

namespace axonn::gpu_machine {

// It takes operands in bfloat16, and adds no bias and no residual.
kernels::cuda::GemmBackend slow_backend();

}  // namespace axonn::gpu_machine
