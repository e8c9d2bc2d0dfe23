#include "core/schedule/chunk_plan.h"

#include <algorithm>

namespace axonn::comm {

double modelled_us(const ChunkPlan& plan, const PipelineCosts& costs) {
  double arrived = 0, computed = 0;
  for (int64_t step = 0; step < plan.num_chunks(); ++step) {
    // Apart from a ragged shard, the pipeline is the same on every rank; this one is rank 0's.
    const ChunkIndex index = plan.gather_visit(0, step);
    const Range chunk = plan.chunk(index);
    if (chunk.size() == 0) continue;
    if (index.shard != 0) {
      const auto whole = static_cast<double>(plan.shard(index.shard).size());
      arrived += costs.chunk_us + costs.shard_us * static_cast<double>(chunk.size()) / whole;
    }
    const int64_t tiles = ceil_div(chunk.size(), plan.tile) * costs.tiles_across;
    const double waves = costs.persistent
                             ? static_cast<double>(tiles) / static_cast<double>(costs.num_workers)
                             : static_cast<double>(ceil_div(tiles, costs.num_workers));
    const double launch_us = costs.persistent ? 0 : costs.chunk_us;
    computed = std::max(arrived, computed) + launch_us + waves * costs.tile_us;
  }
  return computed;
}

int64_t chunks_that_pay(ChunkPlan plan, const PipelineCosts& costs) {
  int64_t best = 1;
  double best_us = 0;
  for (int64_t chunks = 1; chunks <= kMaxChunksPerShard; ++chunks) {
    plan.chunks_per_shard = chunks;
    const double us = modelled_us(plan, costs);
    if (chunks == 1 || us < best_us) {
      best = chunks;
      best_us = us;
    }
  }
  return best;
}

}  // namespace axonn::comm
