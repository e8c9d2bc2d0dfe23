#include "core/cuda/fused/fused_calls.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/fused/copies.h"
#include "core/cuda/fused/write_value.h"
#include "core/cuda/reduce.h"
#include "core/schedule/partition.h"

namespace axonn::kernels::cuda {
namespace {

// A call on a stream, from counting the epoch to raising the flag that peers wait for. An exception
// also raises the flag, because the call has already been counted.
class Call {
 public:
  Call(const Peers& peers, int32_t own_chunks, cudaStream_t stream)
      : peers_(peers), stream_(stream) {
    AXONN_CUDA_CHECK(begin_call(peers, own_chunks, stream));
  }
  ~Call() {
    if (!ended_) (void)end_call(peers_, stream_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void end() {
    ended_ = true;
    AXONN_CUDA_CHECK(end_call(peers_, stream_));
  }

 private:
  const Peers& peers_;
  cudaStream_t stream_;
  bool ended_ = false;
};

// Work on the copy stream during the GEMM: a transport's delivery or the switch's sum. The next
// work on the compute stream may overwrite the shard, and counts the next epoch. So it waits for
// the delivery, even if an exception cuts the call short.
class Delivery {
 public:
  explicit Delivery(const CallStreams& streams) : streams_(streams) {
    AXONN_CUDA_CHECK(cudaEventRecord(streams.begun, streams.compute));
    AXONN_CUDA_CHECK(cudaStreamWaitEvent(streams.copy, streams.begun, 0));
  }
  ~Delivery() {
    if (!joined_) (void)enqueue_join();
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  void join() {
    if (joined_) return;
    joined_ = true;
    AXONN_CUDA_CHECK(enqueue_join());
  }

 private:
  cudaError_t enqueue_join() {
    const cudaError_t error = cudaEventRecord(streams_.delivered, streams_.copy);
    return error != cudaSuccess ? error
                                : cudaStreamWaitEvent(streams_.compute, streams_.delivered, 0);
  }

  const CallStreams& streams_;
  bool joined_ = false;
};

// Delivers the rows, or tells the transport that an exception has prevented the delivery.
class Bringing {
 public:
  explicit Bringing(ShardTransport& transport) : transport_(transport) {}
  ~Bringing() {
    if (!delivered_) transport_.give_up();
  }
  Bringing(const Bringing&) = delete;
  Bringing& operator=(const Bringing&) = delete;

  void deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) {
    transport_.deliver(peers, rows, stream);
    delivered_ = true;
  }

 private:
  ShardTransport& transport_;
  bool delivered_ = false;
};

// Returns the flag that only this rank raises, after its deliveries.
const uint32_t* own_rows_left(const Peers& peers) {
  return reinterpret_cast<const uint32_t*>(
      at(peers.pads[peers.rank], comm::signal_offset_bytes(kDoneFlags + peers.rank)));
}

void require_supported(const GemmBackend& backend, const FusedGemm& gemm) {
  if (const char* why = backend.why_unsupported(gemm)) throw std::invalid_argument(why);
}

int64_t slot_bytes(const FusedGemm& gemm, int32_t num_ranks) {
  return gemm.m / num_ranks * gemm.n * size_of(gemm.dtype);
}

// Returns the GEMM with its output rows sent to their owners' staging slots.
FusedGemm leaving(FusedGemm gemm, const Peers& peers, const comm::SignalLayout& layout) {
  const int64_t bytes = slot_bytes(gemm, peers.num_ranks);
  Departures& departures = gemm.departures;
  departures.num_ranks = peers.num_ranks;
  departures.rank = peers.rank;
  departures.chunks_per_shard = static_cast<int32_t>(layout.chunks_per_shard);
  departures.counters = peers.counters;
  departures.epoch = peers.epoch;
  for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
    departures.slots[rank] = at(peers.workspaces[rank], peers.rank * bytes);
    departures.pads[rank] = peers.pads[rank];
  }
  gemm.ldd = gemm.n;
  return gemm;
}

// Sets the addresses where this rank's rows arrive from each source, in rank order.
void set_own_slots(const Peers& peers, int64_t bytes, const void** slots) {
  for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
    slots[rank] = at(peers.workspaces[peers.rank], rank * bytes);
  }
}

// Sums this rank's rows. All addends must have arrived.
void reduce(const Peers& peers, const FusedGemm& gemm, void* sum, cudaStream_t stream) {
  const int64_t bytes = slot_bytes(gemm, peers.num_ranks);
  const void* slots[kMaxPeers];
  set_own_slots(peers, bytes, slots);
  AXONN_CUDA_CHECK(reduce_slots(sum, slots, peers.num_ranks, bytes / size_of(gemm.dtype),
                                gemm.dtype, ReduceOp::kSum, stream));
}

// Sums this rank's rows and copies the sums to all ranks, `offset` bytes into their workspaces.
void reduce_and_push(const Peers& peers, const FusedGemm& gemm, int64_t offset,
                     const comm::SignalLayout& layout, cudaStream_t stream) {
  const int64_t bytes = slot_bytes(gemm, peers.num_ranks);
  void* own_sum = at(peers.workspaces[peers.rank], offset);
  reduce(peers, gemm, own_sum, stream);
  for (int32_t step = 0; step < peers.num_ranks; ++step) {
    const int32_t to = receiver(peers, step);
    if (to != peers.rank) copy(at(peers.workspaces[to], offset), own_sum, bytes, stream);
    for (int64_t chunk = 0; chunk < layout.chunks_per_shard; ++chunk) {
      push_flag(peers, to, layout.flag(1, {peers.rank, chunk}), stream);
    }
  }
}

// Same, with a kernel that stores the sum at all ranks as it adds.
void reduce_to_all(const Peers& peers, const GemmBackend& backend, const FusedGemm& gemm,
                   bool multicast, int64_t offset, const comm::SignalLayout& layout,
                   cudaStream_t stream) {
  SumToAll sum{.num_ranks = peers.num_ranks,
               .multicast = multicast,
               .dtype = gemm.dtype,
               .bytes = slot_bytes(gemm, peers.num_ranks)};
  set_own_slots(peers, sum.bytes, sum.sources);
  for (int32_t step = 0; step < peers.num_ranks; ++step) {  // each rank starts with a different one
    sum.destinations[step] = at(peers.workspaces[receiver(peers, step)], offset);
  }
  if (multicast) sum.destinations[0] = at(peers.multicast, offset);
  AXONN_CUDA_CHECK(backend.sum_to_all(sum, stream));
  AXONN_CUDA_CHECK(raise_chunks(peers, layout, 1, stream));
}

// Returns the GEMM with its output in this rank's workspace. Its parts raise only this rank's
// flags, in row order: the GEMM treats its batches as departures to this rank itself.
FusedGemm announced_in_parts(FusedGemm gemm, const Peers& peers, SwitchParts parts,
                             const comm::SignalLayout& layout) {
  Departures& departures = gemm.departures;
  departures.num_ranks = parts.batches;
  departures.rank = parts.batches - 1;  // so that the last batch comes last
  departures.chunks_per_shard = parts.chunks_per_batch;
  departures.counters = peers.counters;
  departures.epoch = peers.epoch;
  const int64_t batch_bytes = slot_bytes(gemm, parts.batches);
  for (int32_t batch = 0; batch < parts.batches; ++batch) {
    departures.slots[batch] = at(peers.workspaces[peers.rank], batch * batch_bytes);
    // The GEMM uses the flags of `departures.rank` for every batch; the shifted pads undo that.
    const int64_t first = layout.flag(kMultiplied, {0, 0}) +
                          (batch - departures.rank) * int64_t{parts.chunks_per_batch};
    departures.pads[batch] = at(peers.pads[peers.rank], comm::signal_offset_bytes(first));
  }
  gemm.ldd = gemm.n;
  return gemm;
}

// Sums the products of all ranks in the switch, part by part, while the GEMM runs.
void all_reduce_in_switch(const Peers& peers, const GemmBackend& backend,
                          const LaunchConfig& config, FusedGemm gemm, void* output,
                          const CallStreams& streams) {
  const SwitchParts parts = SwitchParts::of(gemm.m);
  const comm::SignalLayout layout{kNumSwitchPhases, peers.num_ranks, parts.count()};
  const int64_t row_bytes = gemm.n * size_of(gemm.dtype);
  const int64_t sums = gemm.m * row_bytes;  // behind the products
  SwitchSum sum{.addends = peers.multicast,
                .sums = at(peers.multicast, sums),
                .own_sums = at(peers.workspaces[peers.rank], sums),
                .output = output,
                .dtype = gemm.dtype,
                .num_parts = parts.count(),
                .part_end = {},
                .num_ctas = static_cast<int32_t>(switch_sum_ctas(config.num_ctas))};
  for (int32_t part = 0; part < sum.num_parts; ++part) {
    sum.part_end[part] = parts.row_end(gemm.m, part) * row_bytes / kStoreBytes;
  }
  gemm = announced_in_parts(gemm, peers, parts, layout);
  require_supported(backend, gemm);
  Call call(peers, 0, streams.compute);
  std::optional<Delivery> delivery;  // the switch's sum: after the GEMM in a graph, else next to it
  if (streams.branches == Branches::kSideBySide) delivery.emplace(streams);
  AXONN_CUDA_CHECK(backend.launch(gemm, beside_switch_sum(config), streams.compute));
  if (!delivery) delivery.emplace(streams);
  AXONN_CUDA_CHECK(backend.sum_in_switch(peers, sum, streams.copy));
  delivery->join();
  call.end();
}

}  // namespace

void load_kernels(const GemmBackend& backend) {
  AXONN_CUDA_CHECK(backend.load());
  load_write_value();
  AXONN_CUDA_CHECK(load_handshake());
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
    AXONN_CUDA_CHECK(load_reduce_slots(dtype));
  }
}

int64_t gather_workspace_bytes(const GatheredRows& rows) {
  return rows.plan.count * rows.row_bytes;
}

int64_t reduce_scatter_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks) {
  return slot_bytes(gemm, num_ranks) * num_ranks;
}

int64_t all_reduce_workspace_bytes(const FusedGemm& gemm, int32_t num_ranks) {
  return 2 * reduce_scatter_workspace_bytes(gemm, num_ranks);
}

void all_gather_gemm(const Peers& all, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, Arriving arriving, const GatheredRows& rows,
                     ShardTransport& transport, const CallStreams& streams) {
  Peers peers = all;
  peers.apart = !transport.writes_to_peers();
  void* workspace = peers.workspaces[peers.rank];
  (rows.is_a ? gemm.a : gemm.b) = workspace;
  gemm.arrivals = {.dim = arriving,
                   .plan = rows.plan,
                   .rank = peers.rank,
                   .pad = peers.pads[peers.rank],
                   .epoch = peers.epoch,
                   .limit = peers.limit};
  const bool notices = streams.branches == Branches::kExpected && transport.writes_to_peers();
  if (notices) gemm.arrivals.limit.own_rows_left = own_rows_left(peers);
  require_supported(backend, gemm);

  const comm::Range own = rows.plan.shard(peers.rank);
  Bringing bringing(transport);
  Call call(peers, static_cast<int32_t>(rows.plan.chunks_per_shard), streams.compute);
  Delivery delivery(streams);
  bringing.deliver(peers, rows, streams.copy);
  if (notices) push_flag(peers, peers.rank, kDoneFlags + peers.rank, streams.copy);
  copy(at(workspace, own.begin * rows.row_bytes), rows.shard, own.size() * rows.row_bytes,
       streams.compute);
  if (streams.branches == Branches::kInTurn) delivery.join();
  const cudaError_t launched = backend.launch(gemm, config, streams.compute);
  transport.confirm(peers, streams.compute);
  delivery.join();
  AXONN_CUDA_CHECK(launched);
  call.end();
}

void gemm_reduce_scatter(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         FusedGemm gemm, void* output, const CallStreams& streams) {
  const comm::SignalLayout layout{1, peers.num_ranks, chunks_per_shard(gemm.m / peers.num_ranks)};
  gemm = leaving(gemm, peers, layout);
  require_supported(backend, gemm);
  Call call(peers, 0, streams.compute);
  AXONN_CUDA_CHECK(backend.launch(gemm, config, streams.compute));
  AXONN_CUDA_CHECK(await_chunks(peers, layout, 0, streams.compute));
  reduce(peers, gemm, output, streams.compute);
  call.end();
}

SumBroadcastProblem sum_broadcast_problem(const Peers& peers, const GemmBackend& backend,
                                          const FusedGemm& gemm, bool any_order) {
  return {.num_ranks = peers.num_ranks,
          .slot_bytes = slot_bytes(gemm, peers.num_ranks),
          .has_multicast = peers.multicast != nullptr,
          .has_kernel = backend.sum_to_all != nullptr,
          .any_order = any_order};
}

void gemm_all_reduce(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, SumBroadcast way, void* output, const CallStreams& streams) {
  const comm::SignalLayout layout{2, peers.num_ranks, chunks_per_shard(gemm.m / peers.num_ranks)};
  if (const char* why = why_no_sum_broadcast(way, sum_broadcast_problem(peers, backend, gemm))) {
    throw std::invalid_argument(why);
  }
  if (way == SumBroadcast::kSwitch) {
    all_reduce_in_switch(peers, backend, config, gemm, output, streams);
    return;
  }
  const int64_t bytes = slot_bytes(gemm, peers.num_ranks);
  const int64_t sums = peers.num_ranks * bytes;  // after the slots come the sums of all shards
  const int64_t own = sums + peers.rank * bytes;
  gemm = leaving(gemm, peers, layout);
  require_supported(backend, gemm);
  Call call(peers, 0, streams.compute);
  AXONN_CUDA_CHECK(backend.launch(gemm, config, streams.compute));
  AXONN_CUDA_CHECK(await_chunks(peers, layout, 0, streams.compute));
  if (way == SumBroadcast::kCopyEngine) {
    reduce_and_push(peers, gemm, own, layout, streams.compute);
  } else {
    const bool multicast = way == SumBroadcast::kMulticast;
    reduce_to_all(peers, backend, gemm, multicast, own, layout, streams.compute);
  }
  AXONN_CUDA_CHECK(await_chunks(peers, layout, 1, streams.compute));
  copy(output, at(peers.workspaces[peers.rank], sums), sums, streams.compute);
  call.end();
}

}  // namespace axonn::kernels::cuda
