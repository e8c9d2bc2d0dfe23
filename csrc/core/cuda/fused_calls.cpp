#include "core/cuda/fused_calls.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/reduce.h"
#include "core/partition.h"

namespace axonn::kernels::cuda {
namespace {

char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  AXONN_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}

// Raises a flag of a peer behind what the stream has copied there.
void push_flag(const Peers& peers, int32_t to, int64_t flag, cudaStream_t stream) {
  copy(at(peers.pads[to], comm::signal_offset_bytes(flag)), peers.epoch_to_push, sizeof(uint32_t),
       stream);
}

// A call on a stream, from the epoch's count to the word that peers wait for: that is given also
// where an exception cuts the call short, since it has been counted.
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

void require_supported(const GemmBackend& backend, const FusedGemm& gemm) {
  if (const char* why = backend.why_unsupported(gemm)) throw std::invalid_argument(why);
}

// The ranks that need this one's shard, whoever comes to it first first: they work through shards
// from their own upwards.
int32_t receiver(const Peers& peers, int32_t step) {
  return (peers.rank - step + peers.num_ranks) % peers.num_ranks;
}

void push_shard(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) {
  const auto layout = comm::SignalLayout::of(rows.plan, 1);
  const int64_t own = rows.plan.shard(peers.rank).begin;
  for (int32_t step = 1; step < peers.num_ranks; ++step) {
    const int32_t to = receiver(peers, step);
    for (int64_t chunk = 0; chunk < rows.plan.chunks_per_shard; ++chunk) {
      const comm::ChunkIndex index{peers.rank, chunk};
      const comm::Range range = rows.plan.chunk(index);
      const auto* from =
          static_cast<const char*>(rows.shard) + (range.begin - own) * rows.row_bytes;
      copy(at(peers.workspaces[to], range.begin * rows.row_bytes), from,
           range.size() * rows.row_bytes, stream);
      push_flag(peers, to, layout.flag(0, index), stream);
    }
  }
}

int64_t slot_bytes(const FusedGemm& gemm, int32_t num_ranks) {
  return gemm.m / num_ranks * gemm.n * size_of(gemm.dtype);
}

// The product whose rows leave for their owners' staging slots.
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

// Multiplies, sends each rank its rows, and adds up the own ones once all have come.
void multiply_and_reduce(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         const FusedGemm& gemm, void* sum, const comm::SignalLayout& layout,
                         cudaStream_t stream) {
  const int64_t bytes = slot_bytes(gemm, peers.num_ranks);
  const void* slots[kMaxPeers];
  for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
    slots[rank] = at(peers.workspaces[peers.rank], rank * bytes);
  }
  AXONN_CUDA_CHECK(backend.launch(gemm, config, stream));
  AXONN_CUDA_CHECK(await_chunks(peers, layout, 0, stream));
  AXONN_CUDA_CHECK(reduce_slots(sum, slots, peers.num_ranks, bytes / size_of(gemm.dtype),
                                gemm.dtype, ReduceOp::kSum, stream));
}

// Other ranks' shards, in the order in which the GEMM asks for them.
void pull_shards(const Peers& peers, const GatheredRows& rows, const void* const* shards,
                 cudaStream_t stream) {
  const auto layout = comm::SignalLayout::of(rows.plan, 1);
  void* workspace = peers.workspaces[peers.rank];
  for (int64_t step = 0; step < rows.plan.num_chunks(); ++step) {
    const comm::ChunkIndex index = rows.plan.gather_visit(peers.rank, step);
    if (index.shard == peers.rank) continue;
    const comm::Range range = rows.plan.chunk(index);
    const int64_t begin = rows.plan.shard(index.shard).begin;
    const auto* from =
        static_cast<const char*>(shards[index.shard]) + (range.begin - begin) * rows.row_bytes;
    copy(at(workspace, range.begin * rows.row_bytes), from, range.size() * rows.row_bytes, stream);
    push_flag(peers, peers.rank, layout.flag(0, index), stream);
  }
}

// Begins the call, has the other ranks' rows delivered on the copy stream by `deliver`, and
// multiplies meanwhile.
template <typename Deliver>
void gather_and_multiply(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         FusedGemm gemm, Arriving arriving, const GatheredRows& rows,
                         const CallStreams& streams, Deliver&& deliver) {
  void* workspace = peers.workspaces[peers.rank];
  (rows.is_a ? gemm.a : gemm.b) = workspace;
  gemm.arrivals = {.dim = arriving,
                   .plan = rows.plan,
                   .rank = peers.rank,
                   .pad = peers.pads[peers.rank],
                   .epoch = peers.epoch,
                   .limit = peers.limit};
  require_supported(backend, gemm);

  const comm::Range own = rows.plan.shard(peers.rank);
  Call call(peers, static_cast<int32_t>(rows.plan.chunks_per_shard), streams.compute);
  AXONN_CUDA_CHECK(cudaEventRecord(streams.begun, streams.compute));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(streams.copy, streams.begun, 0));
  deliver();
  AXONN_CUDA_CHECK(cudaEventRecord(streams.delivered, streams.copy));

  copy(at(workspace, own.begin * rows.row_bytes), rows.shard, own.size() * rows.row_bytes,
       streams.compute);
  const cudaError_t launched = backend.launch(gemm, config, streams.compute);
  // What comes next on the stream may overwrite the shard, and counts the next epoch.
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(streams.compute, streams.delivered, 0));
  AXONN_CUDA_CHECK(launched);
  call.end();
}

}  // namespace

void load_kernels(const GemmBackend& backend) {
  AXONN_CUDA_CHECK(backend.load());
  AXONN_CUDA_CHECK(load_handshake());
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
    AXONN_CUDA_CHECK(load_reduce_slots(dtype));
  }
}

int32_t chunks_per_shard(int64_t shard_rows) {
  return static_cast<int32_t>(
      std::clamp<int64_t>(shard_rows / kChunkRows, 1, comm::kMaxChunksPerShard));
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

void all_gather_gemm(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, Arriving arriving, const GatheredRows& rows,
                     const CallStreams& streams) {
  gather_and_multiply(peers, backend, config, gemm, arriving, rows, streams,
                      [&] { push_shard(peers, rows, streams.copy); });
}

void pulled_gather_gemm(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                        FusedGemm gemm, const GatheredRows& rows, const void* const* shards,
                        const CallStreams& streams) {
  Peers alone = peers;  // for whom nobody waits
  alone.num_ranks = 1;
  gather_and_multiply(alone, backend, config, gemm, Arriving::kRows, rows, streams,
                      [&] { pull_shards(peers, rows, shards, streams.copy); });
}

void gemm_reduce_scatter(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                         FusedGemm gemm, void* output, const CallStreams& streams) {
  const comm::SignalLayout layout{1, peers.num_ranks, chunks_per_shard(gemm.m / peers.num_ranks)};
  gemm = leaving(gemm, peers, layout);
  require_supported(backend, gemm);
  Call call(peers, 0, streams.compute);
  multiply_and_reduce(peers, backend, config, gemm, output, layout, streams.compute);
  call.end();
}

void gemm_all_reduce(const Peers& peers, const GemmBackend& backend, const LaunchConfig& config,
                     FusedGemm gemm, void* output, const CallStreams& streams) {
  const comm::SignalLayout layout{2, peers.num_ranks, chunks_per_shard(gemm.m / peers.num_ranks)};
  const int64_t bytes = slot_bytes(gemm, peers.num_ranks);
  const int64_t sums = peers.num_ranks * bytes;  // behind the slots, the sums of all shards
  void* own_sum = at(peers.workspaces[peers.rank], sums + peers.rank * bytes);
  gemm = leaving(gemm, peers, layout);
  require_supported(backend, gemm);
  Call call(peers, 0, streams.compute);
  multiply_and_reduce(peers, backend, config, gemm, own_sum, layout, streams.compute);
  for (int32_t step = 0; step < peers.num_ranks; ++step) {
    const int32_t to = receiver(peers, step);
    if (to != peers.rank) {
      copy(at(peers.workspaces[to], sums + peers.rank * bytes), own_sum, bytes, streams.compute);
    }
    for (int64_t chunk = 0; chunk < layout.chunks_per_shard; ++chunk) {
      push_flag(peers, to, layout.flag(1, {peers.rank, chunk}), streams.compute);
    }
  }
  AXONN_CUDA_CHECK(await_chunks(peers, layout, 1, streams.compute));
  copy(output, at(peers.workspaces[peers.rank], sums), sums, streams.compute);
  call.end();
}

}  // namespace axonn::kernels::cuda
