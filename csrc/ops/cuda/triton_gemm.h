// The fused GEMMs in Triton (kernels/triton/fused.py), which Python has registered as ops.
#pragma once

#include "core/cuda/fused/fused_calls.h"

namespace axonn::ops::cuda {

// Returns whether Python has registered them, as it does if triton is installed.
bool has_triton_gemms();

// Only num_ctas of a launch's config is read: Python chooses the tiles. The first launch of a
// kernel compiles it, which takes seconds, and loads it. Loading may wait for kernels that run on
// the device. That wait ends, because those kernels wait for nothing behind this launch: only for
// the peers' earlier calls, and for pushes that come before the launch.
const kernels::cuda::GemmBackend& triton_gemms();

}  // namespace axonn::ops::cuda
