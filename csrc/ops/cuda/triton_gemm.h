// The fused GEMMs in Triton (kernels/triton/fused.py), which Python has registered as ops.
#pragma once

#include "core/cuda/fused/fused_calls.h"

namespace axonn::ops::cuda {

// Returns whether Python has registered them, as it does where triton is installed.
bool has_triton_gemms();

// Of a launch's config, only num_ctas is read: Python chooses the tiles. A launch compiles what was
// not launched before, which takes seconds, and loads it. That may wait for kernels that run on the
// device. It ends nevertheless, since what those wait for does not depend on a launch: the peers'
// calls before this one, and pushes that come in front of the launch.
const kernels::cuda::GemmBackend& triton_gemms();

}  // namespace axonn::ops::cuda
