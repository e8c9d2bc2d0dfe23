// How calls share a workspace.
#pragma once

#include "core/symmetric/epoch_flag.h"

namespace axonn::comm {

// The number of parts ("halves") of a workspace. The call with epoch e uses half e % kNumHalves. It
// starts once every rank has completed the call with epoch e - kNumHalves, which was the last to
// read that half.
inline constexpr Epoch kNumHalves = 2;
constexpr Epoch epoch_to_await(Epoch epoch) { return epoch - kNumHalves; }

}  // namespace axonn::comm
