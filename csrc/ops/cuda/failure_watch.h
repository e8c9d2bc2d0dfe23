// Reports on stderr which wait a kernel gave up. CUDA's own error, raised by whichever call comes
// next, does not say so.
#pragma once

#include <memory>
#include <string>

#include "core/cuda/fused/peer_state.h"

namespace axonn::ops::cuda {

// From now on, reports the failures that `state` records for calls of `group`.
void watch_for_failure(std::shared_ptr<const kernels::cuda::PinnedState> state, std::string group);

}  // namespace axonn::ops::cuda
