// Connects ranks with non-blocking communicators, and waits for calls on them.
#pragma once

#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>

#include "core/ranks/errors.h"
#include "core/ranks/key_value_store.h"

namespace axonn::comm {

// Returns rank 0's new id on all ranks, through a key that is used once. Throws CommunicationError
// if the id does not arrive within the timeout, or if the value is not an id.
ncclUniqueId share_nccl_id(KeyValueStore& store, const std::string& key, int64_t rank,
                           std::chrono::duration<double> timeout);

// NCCL has not accepted a call within the timeout, because a peer has not joined it.
class NotAccepted : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// Waits until NCCL has accepted the call that returned `result`; meanwhile calls `check`, which may
// throw. Throws CommunicationError naming `what` if NCCL rejects the call, and NotAccepted if it is
// not accepted within the timeout.
void settle_nccl(ncclResult_t result, ncclComm_t comm, const std::string& what,
                 std::chrono::duration<double> timeout, const std::function<void()>& check = {});

}  // namespace axonn::comm
