// The order in which ranks exchange the chunks of a gather by sends and receives. They match only
// if both sides issue them in one order: at each step, every rank sends one chunk and receives one.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"
#include "core/schedule/chunk_plan.h"

namespace axonn::comm {

struct ChunkExchange {
  int64_t to;
  ChunkIndex sent;  // of this rank's shard
  int64_t from;
  ChunkIndex received;  // of the shard of rank `from`
};

AXONN_HOST_DEVICE constexpr int64_t num_exchanges(const ChunkPlan& plan) {
  return (plan.num_shards - 1) * plan.chunks_per_shard;
}

// Returns the chunks that `rank` sends and receives at a step. A rank receives in the order of
// gather_visit, after its own shard. So it sends first to the rank that visits its chunks first.
AXONN_HOST_DEVICE constexpr ChunkExchange exchange_at(const ChunkPlan& plan, int64_t rank,
                                                      int64_t step) {
  const int64_t distance = 1 + step / plan.chunks_per_shard;
  const int64_t chunk = step % plan.chunks_per_shard;
  const int64_t from = (rank + distance) % plan.num_shards;
  return {
      (rank - distance + plan.num_shards) % plan.num_shards, {rank, chunk}, from, {from, chunk}};
}

}  // namespace axonn::comm
