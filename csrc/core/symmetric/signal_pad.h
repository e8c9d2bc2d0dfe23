// The beginning of a rank's arena: the rank's progress and its calls. Only the files that implement
// symmetric_group.h include this.
#pragma once

#include "core/symmetric/epoch_flag.h"
#include "core/symmetric/protocol.h"
#include "core/symmetric/symmetric_group.h"

namespace axonn::comm {

struct SymmetricGroup::Pad {
  // How a rank's part in its group ended; 0 if it has not ended.
  static constexpr Epoch kFailed = 1;  // a call was left by an exception
  static constexpr Epoch kLeft = 2;    // the group was destroyed

  EpochFlag started;
  EpochFlag completed;
  SharedWord end;       // 0, kFailed or kLeft
  SharedWord sleeping;  // 1 while this rank sleeps until some peer's flag is raised
  CallSignature signature[kNumHalves];
  EpochFlag ready[kNumFlags];
};

}  // namespace axonn::comm
