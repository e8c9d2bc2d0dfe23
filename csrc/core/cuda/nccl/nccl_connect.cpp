#include "core/cuda/nccl/nccl_connect.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/cuda/nccl/nccl.h"
#include "core/ranks/errors.h"
#include "core/ranks/rendezvous.h"

namespace axonn::comm {

ncclUniqueId share_nccl_id(KeyValueStore& store, const std::string& key, int64_t rank,
                           std::chrono::duration<double> timeout) {
  ncclUniqueId id{};
  if (rank == 0) {
    AXONN_NCCL_CHECK(ncclGetUniqueId(&id));
    store.set(key, std::string(id.internal, sizeof(id.internal)));
    return id;
  }
  const std::string bytes = await_value(store, key, [&](std::chrono::duration<double> waited) {
    if (waited < timeout) return;
    throw CommunicationError("connecting NCCL: rank " + std::to_string(rank) +
                             " found no NCCL id of rank 0 " + after_timeout(timeout.count()));
  });
  if (bytes.size() != sizeof(id.internal)) {
    throw CommunicationError(key + " holds " + std::to_string(bytes.size()) +
                             " bytes, expected an NCCL id of " +
                             std::to_string(sizeof(id.internal)));
  }
  std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
  return id;
}

void settle_nccl(ncclResult_t result, ncclComm_t comm, const std::string& what,
                 std::chrono::duration<double> timeout, const std::function<void()>& check) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  auto pause = std::chrono::microseconds(10);
  while (result == ncclInProgress) {
    if (comm == nullptr) throw CommunicationError(what + ": NCCL made no communicator");
    AXONN_NCCL_CHECK(ncclCommGetAsyncError(comm, &result));
    if (result != ncclInProgress) break;
    if (check) check();
    if (Clock::now() > end) {
      throw NotAccepted(what + ": not done " + after_timeout(timeout.count()));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
  }
  if (result != ncclSuccess) throw_nccl(result, what, __FILE__, __LINE__);
}

}  // namespace axonn::comm
