#include "ops/composed/chunked.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace axonn::ops {

comm::ChunkPlan plan_chunks(const at::Tensor& moved, int64_t length) {
  // A smaller chunk costs more than it hides. On the CPU it costs messages; the number was
  // measured over gloo. On a GPU it costs launches; the number is a guess: 10 us on an NVLink of
  // 400 GB/s.
  const int64_t min_chunk_bytes = moved.is_cpu() ? 256 << 10 : 4 << 20;
  // On a GPU, chunks end at tile edges, so that not every chunk has a ragged tile.
  const int64_t tile = moved.is_cpu() ? 1 : 128;
  const int64_t chunks = std::min(
      {length, static_cast<int64_t>(moved.nbytes()) / min_chunk_bytes, comm::kMaxChunksPerShard});
  return {.count = length,
          .num_shards = 1,
          .chunks_per_shard = std::max<int64_t>(chunks, 1),
          .tile = tile};
}

std::vector<comm::Range> ranges_of(const comm::ChunkPlan& plan) {
  std::vector<comm::Range> ranges;
  for (int64_t i = 0; i < plan.num_chunks(); ++i) {
    const auto range = plan.chunk(plan.from_ordinal(i));
    if (range.size() > 0) ranges.push_back(range);
  }
  if (ranges.empty()) ranges.push_back({0, plan.count});
  return ranges;
}

void multiply_blocks(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  if (!out.is_cpu()) {
    at::bmm_out(out, a, b);
    return;
  }
  for (int64_t i = 0; i < out.size(0); ++i) {
    auto block = out[i];
    at::mm_out(block, a[i], b[i]);
  }
}

}  // namespace axonn::ops
