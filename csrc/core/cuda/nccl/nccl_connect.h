// Non-blocking communicators: ranks get one here, and wait here for a call on one.
#pragma once

#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>

#include "core/ranks/errors.h"
#include "core/ranks/key_value_store.h"

namespace axonn::comm {

// Returns rank 0's new id on all ranks, through a key that is used once. Throws CommunicationError
// if it is not there within the timeout, or if the value is not an id.
ncclUniqueId share_nccl_id(KeyValueStore& store, const std::string& key, int64_t rank,
                           std::chrono::duration<double> timeout);

// NCCL has not accepted a call within the timeout, since a peer has not come to it.
class NotAccepted : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// Waits until NCCL has accepted what returned `result`; `check` is called meanwhile, and may throw.
// Throws CommunicationError naming `what` if NCCL refuses it, and NotAccepted if it is not done
// within the timeout.
void settle_nccl(ncclResult_t result, ncclComm_t comm, const std::string& what,
                 std::chrono::duration<double> timeout, const std::function<void()>& check = {});

}  // namespace axonn::comm
