#include "core/cuda/nccl/nccl_chunks.h"

#include <stdexcept>
#include <string>

#include "core/cuda/fused/copies.h"
#include "core/cuda/nccl/nccl.h"
#include "core/cuda/nccl/nccl_connect.h"
#include "core/ranks/errors.h"
#include "core/schedule/chunk_exchange.h"

namespace axonn::kernels::cuda {

NcclChunks::NcclChunks(int64_t rank, int64_t num_ranks, comm::KeyValueStore& store,
                       const std::string& key, std::chrono::duration<double> timeout)
    : timeout_(timeout) {
  const ncclUniqueId id = comm::share_nccl_id(store, key, rank, timeout);
  ncclConfig_t settings = NCCL_CONFIG_INITIALIZER;
  settings.blocking = 0;
  settings.maxCTAs = kMostCtas;
  // By default NCCL's CTAs form a cluster on sm_90. All CTAs of a cluster need SMs of one GPC at
  // the same time, but the SMs that the GEMM leaves free may be anywhere.
  settings.cgaClusterSize = 0;
  const ncclResult_t result = ncclCommInitRankConfig(&comm_, static_cast<int>(num_ranks), id,
                                                     static_cast<int>(rank), &settings);
  try {
    comm::settle_nccl(result, comm_, "connecting " + std::to_string(num_ranks) + " ranks",
                      timeout_);
  } catch (...) {
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
    throw;
  }
}

NcclChunks::~NcclChunks() { (void)ncclCommAbort(comm_); }

void NcclChunks::exchange(const Message& message, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const auto bytes = static_cast<size_t>(message.bytes);
  AXONN_NCCL_CHECK(ncclGroupStart());
  const ncclResult_t sent =
      ncclSend(message.sent, bytes, ncclInt8, static_cast<int>(message.to), comm_, stream);
  const ncclResult_t received =
      ncclRecv(message.received, bytes, ncclInt8, static_cast<int>(message.from), comm_, stream);
  const ncclResult_t end = ncclGroupEnd();  // needed even after an error, because NCCL waits for it
  const std::string what = "a chunk to rank " + std::to_string(message.to) + " and from rank " +
                           std::to_string(message.from);
  for (const ncclResult_t result : {sent, received}) {
    if (result != ncclSuccess && result != ncclInProgress) {
      comm::throw_nccl(result, what, __FILE__, __LINE__);
    }
  }
  comm::settle_nccl(end, comm_, what, timeout_);
}

void NcclChunks::deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) {
  // If shards differ in size, sends and receives do not match.
  if (rows.plan.count % rows.plan.num_shards != 0) {
    throw std::invalid_argument("the ranks' shards differ in size");
  }
  if (gave_up_) {
    throw comm::CommunicationError(
        "NCCL brings no more rows to rank " + std::to_string(peers.rank) +
        ": an earlier call was cut short on this rank, and its peers are ahead of it");
  }
  const auto layout = comm::SignalLayout::of(rows.plan, 1);
  const int64_t own = rows.plan.shard(peers.rank).begin;
  for (int64_t step = 0; step < comm::num_exchanges(rows.plan); ++step) {
    const comm::ChunkExchange swap = comm::exchange_at(rows.plan, peers.rank, step);
    const comm::Range sent = rows.plan.chunk(swap.sent);
    const comm::Range received = rows.plan.chunk(swap.received);
    if (sent.size() > 0) {
      exchange({.sent = static_cast<const char*>(rows.shard) + (sent.begin - own) * rows.row_bytes,
                .to = swap.to,
                .received = at(peers.workspaces[peers.rank], received.begin * rows.row_bytes),
                .from = swap.from,
                .bytes = sent.size() * rows.row_bytes},
               stream);
    }
    push_flag(peers, peers.rank, layout.flag(0, swap.received), stream);
  }
  push_flag(peers, peers.rank, kDoneFlags + peers.rank, stream);
}

void NcclChunks::confirm(const Peers& peers, cudaStream_t stream) {
  AXONN_CUDA_CHECK(await_own(peers, stream));
}

}  // namespace axonn::kernels::cuda
