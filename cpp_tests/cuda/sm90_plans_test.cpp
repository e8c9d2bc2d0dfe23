#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/cuda/sm90/plans.h"
#include "core/schedule/tile_schedule.h"

namespace axonn::kernels::sm90 {
namespace {

using comm::ChunkPlan;
using cuda::Arriving;
using cuda::FusedGemm;

const LaunchConfig kConfig{128, 256, 64, 4, 8, 4, 2, 1, 132};
const LaunchConfig kAcross{128, 128, 64, 6, 8, 4, 1, 2, 132, Schedule::kPingpong};
char memory[64];

void* address() {
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + 15) & ~15);
}

FusedGemm gemm_of(int64_t m, int64_t n, int64_t k) {
  FusedGemm gemm{};
  gemm.a = gemm.b = address();
  gemm.d = address();
  gemm.m = m;
  gemm.n = n;
  gemm.k = k;
  gemm.lda = gemm.ldb = k;
  gemm.ldd = n;
  gemm.b_transposed = true;
  gemm.dtype = DataType::kBFloat16;
  return gemm;
}

FusedGemm arriving(Arriving dim, const ChunkPlan& plan, int32_t rank) {
  FusedGemm gemm = gemm_of(dim == Arriving::kRows ? plan.count : 512,
                           dim == Arriving::kColumns ? plan.count : 1024,
                           dim == Arriving::kInner ? plan.count : 256);
  gemm.arrivals.dim = dim;
  gemm.arrivals.plan = plan;
  gemm.arrivals.rank = rank;
  return gemm;
}

FusedGemm departing(int64_t m, int64_t n, int32_t ranks, int32_t rank, int32_t chunks) {
  FusedGemm gemm = gemm_of(m, n, 256);
  gemm.d = nullptr;
  gemm.departures.num_ranks = ranks;
  gemm.departures.rank = rank;
  gemm.departures.chunks_per_shard = chunks;
  for (int32_t to = 0; to < ranks; ++to) gemm.departures.slots[to] = address();
  return gemm;
}

// Finds a chunk as the producer warp does: counts the chunks that end at or before the position.
int chunk_at(const ArrivalPlan& plan, int position) {
  int before = 0;
  for (int chunk = 0; chunk < plan.num_chunks; ++chunk) before += plan.chunk_end[chunk] <= position;
  return before;
}

std::vector<ChunkPlan> plans() {
  std::vector<ChunkPlan> result;
  for (const int64_t count : {8, 96, 512, 1000, 4096}) {
    for (const int64_t ranks : {1, 2, 4, 8}) {
      for (const int64_t chunks : {1, 2, 4}) {
        if (count % ranks == 0) result.push_back({count, ranks, chunks});
      }
    }
  }
  return result;
}

TEST(ArrivalPlan, FindsTheChunkOfEachPosition) {
  for (const ChunkPlan& chunks : plans()) {
    const auto plan = arrival_plan(arriving(Arriving::kRows, chunks, 0), kConfig);
    ASSERT_EQ(plan.num_chunks, chunks.num_chunks());
    for (int position = 0; position < chunks.count; ++position) {
      ASSERT_EQ(chunk_at(plan, position), chunks.ordinal(chunks.at(position)));
    }
  }
}

// Replays the walk of load_in_order_of_arrival: it loads every tile of K once, only after waiting
// for the tile's chunks, and waits for chunks in the order of arrival. The exception is a tile that
// straddles the start of this rank's own shard, which comes last.
TEST(ArrivalPlan, WalksAlongKInTheOrderOfArrival) {
  constexpr int kBlockK = 64;
  for (const ChunkPlan& chunks : plans()) {
    for (int32_t rank = 0; rank < chunks.num_shards; ++rank) {
      const auto plan = arrival_plan(arriving(Arriving::kInner, chunks, rank), kConfig);
      const int num_tiles = static_cast<int>(comm::ceil_div(chunks.count, kBlockK));
      std::set<int> loaded, awaited;
      int64_t step = 0;
      int tile = plan.first_block;
      for (int left = num_tiles; left > 0;) {
        const int begin = tile * kBlockK;
        const int last = std::min<int>(begin + kBlockK, static_cast<int>(chunks.count)) - 1;
        for (int chunk = chunk_at(plan, begin); chunk <= chunk_at(plan, last); ++chunk) {
          awaited.insert(chunk);
        }
        const int64_t next =
            chunks.gather_step(rank, chunks.last_delivered(rank, {begin, last + 1}));
        ASSERT_GE(next, step);
        step = next;
        const int stop = plan.stop(chunk_at(plan, last), tile, kBlockK, num_tiles);
        ASSERT_GT(stop, tile);
        const int count = std::min(stop - tile, left);
        for (int at = tile; at < tile + count; ++at) {
          ASSERT_TRUE(loaded.insert(at).second);
          const int end = std::min<int>((at + 1) * kBlockK, static_cast<int>(chunks.count));
          for (int position = at * kBlockK; position < end; ++position) {
            ASSERT_TRUE(awaited.count(chunk_at(plan, position))) << "read before it was there";
          }
        }
        left -= count;
        tile = stop == num_tiles ? 0 : stop;
      }
      ASSERT_EQ(static_cast<int>(loaded.size()), num_tiles);
    }
  }
}

// The CTA that stores the last tile of a chunk signals the chunk, so the counts must match the
// tiles that store, and the rows must be those of the chunk.
TEST(DeparturePlan, CountsTheTilesOfEachChunk) {
  for (const int64_t rows : {1, 100, 128, 300, 512, 1024}) {
    for (const int32_t ranks : {1, 2, 8}) {
      for (const int32_t chunks : {1, 2, 4}) {
        const auto gemm = departing(rows * ranks, 600, ranks, 0, chunks);
        for (const LaunchConfig& config : candidates(kSm90, 2)) {
          const auto plan = departure_plan(gemm, config);
          std::vector<uint32_t> stored(static_cast<size_t>(chunks));
          for (int m = 0; m < comm::ceil_div(rows, config.block_m); ++m) {
            int chunk = 0;
            while (plan.row_end[chunk] <= m) ++chunk;
            ASSERT_LT(chunk, chunks);
            stored[static_cast<size_t>(chunk)] +=
                static_cast<uint32_t>(comm::ceil_div(600, config.block_n));
          }
          for (int32_t chunk = 0; chunk < chunks; ++chunk) {
            ASSERT_EQ(plan.num_tiles[chunk], stored[static_cast<size_t>(chunk)]);
          }
          ASSERT_EQ(plan.row_end[chunks - 1], comm::ceil_div(rows, config.block_m));
        }
      }
    }
  }
}

// A sum in the switch needs the parts of all ranks, so parts end at the same rows whichever tiles
// the ranks use.
TEST(DeparturePlan, AllTilesCutAlike) {
  for (const int64_t rows : {512, 600, 1111, 2048}) {
    const auto gemm = departing(2 * rows, 600, 2, 0, cuda::chunks_per_shard(rows));
    for (int32_t chunk = 0; chunk + 1 < gemm.departures.chunks_per_shard; ++chunk) {
      std::set<int64_t> ends;
      for (const LaunchConfig& config : candidates(kSm90, 2)) {
        ends.insert(departure_plan(gemm, config).row_end[chunk] * config.block_m);
      }
      EXPECT_EQ(ends.size(), 1U) << rows << ", chunk " << chunk;
    }
  }
}

// Chunks begin at the edges of clusters of tiles, for every config that is built.
TEST(DeparturePlan, ChunksAreWholeClustersOfTiles) {
  for (const LaunchConfig& config : candidates(kSm90, 2)) {
    EXPECT_EQ(cuda::kChunkRows % (config.block_m * config.cluster_m), 0) << config.describe();
    EXPECT_EQ(cuda::kChunkRows % (config.block_n * config.cluster_n), 0) << config.describe();
  }
}

// A chunk without tiles is never signalled, so there must be none.
TEST(DeparturePlan, NoChunkIsEmptyWhereShardsAreWholeTiles) {
  for (const int32_t chunks : {1, 2, 3, 4}) {
    const auto plan = departure_plan(departing(2 * chunks * 256, 256, 2, 0, chunks), kConfig);
    for (int32_t chunk = 0; chunk < chunks; ++chunk) ASSERT_GT(plan.num_tiles[chunk], 0U);
  }
}

TEST(TileGrid, StartsWithTheOwnRowsAndEndsWithThem) {
  const ChunkPlan rows{4096, 4, 2};
  for (int32_t rank = 0; rank < 4; ++rank) {
    const auto gather = tile_grid(arriving(Arriving::kRows, rows, rank), kConfig);
    EXPECT_FALSE(gather.along_columns);
    EXPECT_EQ(gather.order.along, 4096 / 256);  // clusters of two tiles of 128 rows
    EXPECT_EQ(gather.order.first, rank * 1024 / 256);
    EXPECT_EQ(gather.order.group, 2U);  // a chunk has 512 rows

    const auto columns = tile_grid(arriving(Arriving::kColumns, rows, rank), kConfig);
    EXPECT_TRUE(columns.along_columns);
    EXPECT_EQ(columns.order.first, rank * 1024 / 256);

    const auto scatter = tile_grid(departing(4096, 512, 4, rank, 2), kConfig);
    EXPECT_EQ(scatter.order.batches, 4U);
    EXPECT_EQ(scatter.order.place(0).batch, static_cast<uint32_t>(rank + 1) % 4);
    EXPECT_EQ(scatter.order.place(scatter.order.num_tiles() - 1).batch,
              static_cast<uint32_t>(rank));
  }
}

// A cluster that shares A is one tile high and 256 columns wide.
TEST(TileGrid, OfClustersAlongColumns) {
  const ChunkPlan rows{4096, 4, 2};
  const auto gather = tile_grid(arriving(Arriving::kRows, rows, 1), kAcross);
  EXPECT_EQ(gather.order.along, 4096 / 128);
  EXPECT_EQ(gather.order.across, 1024 / 256);
  EXPECT_EQ(gather.order.first, 1024 / 128);
  EXPECT_EQ(gather.order.group, 4U);  // a chunk has 512 rows
  const auto columns = tile_grid(arriving(Arriving::kColumns, rows, 1), kAcross);
  EXPECT_EQ(columns.order.along, 4096 / 256);
  EXPECT_EQ(columns.order.across, 512 / 128);
  const auto scatter = tile_grid(departing(1024, 600, 8, 1, 1), kAcross);
  EXPECT_EQ(scatter.order.along, 1U);
  EXPECT_EQ(scatter.order.across, 3U);
}

TEST(WhyUnsupported, NamesWhatIsWrong) {
  const ChunkPlan rows{512, 4, 1};
  const auto expect = [](const char* part, const FusedGemm& gemm) {
    const char* why = why_unsupported(gemm);
    ASSERT_NE(why, nullptr) << part;
    EXPECT_NE(std::string(why).find(part), std::string::npos) << why;
  };
  EXPECT_EQ(why_unsupported(gemm_of(64, 64, 64)), nullptr);
  EXPECT_EQ(why_unsupported(arriving(Arriving::kRows, rows, 0)), nullptr);
  EXPECT_EQ(why_unsupported(departing(512, 64, 4, 0, 1)), nullptr);

  auto gemm = gemm_of(64, 64, 64);
  gemm.dtype = DataType::kFloat32;
  expect("bfloat16 or float16", gemm);
  gemm = gemm_of(64, 64, 64);
  gemm.a = static_cast<char*>(address()) + 2;
  expect("operands must be aligned", gemm);
  expect("16 bytes apart", gemm_of(64, 64, 33));
  gemm = gemm_of(64, 64, 33);
  gemm.lda = gemm.ldb = 40;
  expect("16 bytes long", gemm);
  expect("positive", gemm_of(0, 64, 64));
  expect("below 2^31", gemm_of(int64_t{1} << 31, 64, 64));
  gemm = gemm_of(64, 64, 64);
  gemm.a_transposed = true;
  expect("both be transposed", gemm);
  gemm = gemm_of(64, 64, 64);
  gemm.d = static_cast<char*>(address()) + 2;
  expect("result must be aligned", gemm);
  gemm = gemm_of(36, 64, 64);
  gemm.a_transposed = true;
  gemm.b_transposed = false;
  gemm.lda = 64;
  expect("16 bytes long", gemm);
  expect("lanes", arriving(Arriving::kRows, {512, 16, 4}, 0));
  gemm = arriving(Arriving::kRows, rows, 0);
  gemm.m = 256;
  expect("another size", gemm);
  gemm = departing(512, 64, 4, 0, 1);
  gemm.arrivals = arriving(Arriving::kRows, rows, 0).arrivals;
  expect("both arrive and leave", gemm);
  expect("evenly", departing(510, 64, 4, 0, 1));
  expect("1 to 4 chunks", departing(512, 64, 4, 0, 5));
  gemm = departing(512, 64, 4, 0, 1);
  gemm.departures.num_ranks = 9;
  expect("at most 8 ranks", gemm);
  gemm = departing(512, 64, 4, 0, 1);
  gemm.bias = address();
  expect("bias and residual are added to the sum", gemm);
  gemm = departing(4 * 12, 64, 4, 0, 1);
  gemm.a_transposed = true;
  gemm.b_transposed = false;
  expect("transposed A", gemm);
}

}  // namespace
}  // namespace axonn::kernels::sm90
