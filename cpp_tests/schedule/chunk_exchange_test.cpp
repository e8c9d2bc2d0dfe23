#include "core/schedule/chunk_exchange.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

namespace axonn::comm {
namespace {

TEST(ChunkExchange, EverySendMeetsItsReceiveAtTheSameStep) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t chunks = 1; chunks <= kMaxChunksPerShard; ++chunks) {
      const ChunkPlan plan{ranks * 100, ranks, chunks};
      for (int64_t step = 0; step < num_exchanges(plan); ++step) {
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const ChunkExchange mine = exchange_at(plan, rank, step);
          EXPECT_NE(mine.to, rank);
          EXPECT_NE(mine.from, rank);
          const ChunkExchange theirs = exchange_at(plan, mine.to, step);
          EXPECT_EQ(theirs.from, rank);
          EXPECT_EQ(theirs.received, mine.sent);
          EXPECT_EQ(plan.chunk(theirs.received).size(), plan.chunk(mine.sent).size());
        }
      }
    }
  }
}

TEST(ChunkExchange, EveryChunkComesOnceAndInTheOrderOfItsUse) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t chunks = 1; chunks <= kMaxChunksPerShard; ++chunks) {
      const ChunkPlan plan{ranks * 100, ranks, chunks};
      for (int64_t rank = 0; rank < ranks; ++rank) {
        std::set<int64_t> seen;
        for (int64_t step = 0; step < num_exchanges(plan); ++step) {
          const ChunkExchange exchange = exchange_at(plan, rank, step);
          EXPECT_EQ(exchange.received, plan.gather_visit(rank, chunks + step));
          EXPECT_EQ(exchange.received.shard, exchange.from);
          EXPECT_EQ(exchange.sent.shard, rank);
          seen.insert(plan.ordinal(exchange.received));
        }
        EXPECT_EQ(static_cast<int64_t>(seen.size()), (ranks - 1) * chunks);
      }
    }
  }
}

}  // namespace
}  // namespace axonn::comm
