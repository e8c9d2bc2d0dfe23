// A GEMM for tests of the host code: it waits for flags, stores to peers and raises their flags
// like the sm_90 GEMMs, but multiplies one element after the other.
#pragma once

#include "core/cuda/fused/fused_calls.h"

namespace axonn::gpu_machine {

// Takes bfloat16 operands, and adds neither a bias nor a residual.
kernels::cuda::GemmBackend slow_backend();

}  // namespace axonn::gpu_machine
