// Says on stderr which wait a kernel gave up, since the errors that CUDA then raises, from whatever
// is called next, do not.
#pragma once

#include <memory>
#include <string>

#include "ops/cuda/peer_state.h"

namespace axonn::ops::cuda {

// From now on, for what `state` may tell of a call of `group`.
void watch_for_failure(std::shared_ptr<const PinnedState> state, std::string group);

}  // namespace axonn::ops::cuda
