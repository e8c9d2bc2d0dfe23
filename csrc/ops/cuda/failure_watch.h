// Reports on stderr which wait a kernel gave up. The errors that CUDA then raises, from whatever
// call comes next, do not say so.
#pragma once

#include <memory>
#include <string>

#include "core/cuda/fused/peer_state.h"

namespace axonn::ops::cuda {

// From now on, reports failures that `state` records of calls of `group`.
void watch_for_failure(std::shared_ptr<const kernels::cuda::PinnedState> state, std::string group);

}  // namespace axonn::ops::cuda
