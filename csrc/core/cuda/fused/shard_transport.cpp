#include "core/cuda/fused/shard_transport.h"

#include "core/cuda/fused/copies.h"

namespace axonn::kernels::cuda {

void CopyEnginePush::deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) {
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

// Delivers the chunks in the order in which the GEMM needs them.
void CopyEnginePull::deliver(const Peers& peers, const GatheredRows& rows, cudaStream_t stream) {
  const auto layout = comm::SignalLayout::of(rows.plan, 1);
  void* workspace = peers.workspaces[peers.rank];
  for (int64_t step = 0; step < rows.plan.num_chunks(); ++step) {
    const comm::ChunkIndex index = rows.plan.gather_visit(peers.rank, step);
    if (index.shard == peers.rank) continue;
    const comm::Range range = rows.plan.chunk(index);
    const int64_t begin = rows.plan.shard(index.shard).begin;
    const auto* from =
        static_cast<const char*>(shards_[index.shard]) + (range.begin - begin) * rows.row_bytes;
    copy(at(workspace, range.begin * rows.row_bytes), from, range.size() * rows.row_bytes, stream);
    push_flag(peers, peers.rank, layout.flag(0, index), stream);
  }
}

}  // namespace axonn::kernels::cuda
