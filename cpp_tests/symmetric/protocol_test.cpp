// The collectives of core/symmetric/protocol.h on real calls, with ranks as threads: back to back,
// in chunks, and compared bit by bit with sums in rank order.
#include "core/symmetric/protocol.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "core/numeric/reduce.h"
#include "core/symmetric/symmetric_group.h"
#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using testing::expect_success;
using testing::group_options;
using testing::Launch;
using testing::run_group;

// Inexact in fp32, so that sums tell orders apart.
float element(int64_t rank, int64_t call, int64_t index) {
  return 1.0f / static_cast<float>(3 + 7 * rank + 11 * call + 13 * (index % 101));
}

float sum_in_rank_order(int64_t size, int64_t call, int64_t index) {
  float sum = element(0, call, index);
  for (int64_t rank = 1; rank < size; ++rank) sum += element(rank, call, index);
  return sum;
}

// What ranks agree on, and each rank's part in it.
struct Collective {
  Call call;
  const ChunkPlan& plan;
  int64_t number;

  Collective(SymmetricGroup& group, const char* op, const ChunkPlan& p, int64_t num)
      : call(group, CallSignature::of(op, {num, p.count, p.num_shards, p.chunks_per_shard, p.tile}),
             2 * p.count * static_cast<int64_t>(sizeof(float))),
        plan(p),
        number(num) {}

  float* own() const { return reinterpret_cast<float*>(call.workspace()); }
  const float* of(int64_t peer) const {
    return reinterpret_cast<const float*>(call.workspace_of(peer));
  }
  void produce(Range positions) const {
    for (int64_t i = positions.begin; i < positions.end; ++i) {
      own()[i] = element(call.rank(), number, i);
    }
  }
  void reduce(Range positions, float* destination) const {
    std::vector<const void*> sources;
    for (int64_t rank = 0; rank < call.size(); ++rank) {
      sources.push_back(of(rank) + positions.begin);
    }
    kernels::reduce_slots(destination + positions.begin, sources.data(), call.size(),
                          positions.size(), kernels::DataType::kFloat32, kernels::ReduceOp::kSum);
  }
};

std::vector<float> gather(SymmetricGroup& group, const ChunkPlan& plan, int64_t number) {
  std::vector<float> result(static_cast<size_t>(plan.count));
  Collective c(group, "gather", plan, number);
  run_gather(
      c.call, plan, [&](ChunkIndex, Range positions) { c.produce(positions); },
      [&](ChunkIndex index, Range positions) {
        std::copy(c.of(index.shard) + positions.begin, c.of(index.shard) + positions.end,
                  result.data() + positions.begin);
      });
  return result;
}

std::vector<float> reduce_scatter(SymmetricGroup& group, const ChunkPlan& plan, int64_t number) {
  std::vector<float> result(static_cast<size_t>(plan.count));
  Collective c(group, "reduce_scatter", plan, number);
  run_reduce_scatter(
      c.call, plan, [&](ChunkIndex, Range positions) { c.produce(positions); },
      [&](ChunkIndex, Range positions) { c.reduce(positions, result.data()); });
  return result;
}

std::vector<float> all_reduce(SymmetricGroup& group, const ChunkPlan& plan, int64_t number) {
  std::vector<float> result(static_cast<size_t>(plan.count));
  Collective c(group, "all_reduce", plan, number);
  run_all_reduce(
      c.call, plan, [&](ChunkIndex, Range positions) { c.produce(positions); },
      [&](ChunkIndex, Range positions) {
        c.reduce(positions, plan.num_shards == 1 ? result.data() : c.own() + plan.count);
      },
      [&](ChunkIndex index, Range positions) {
        const float* sums = c.of(index.shard) + plan.count;
        std::copy(sums + positions.begin, sums + positions.end, result.data() + positions.begin);
      });
  return result;
}

// The number of elements that are not what they should be; `rank` owns its shard of the plan.
int64_t mistakes(const std::vector<float>& result, const ChunkPlan& plan, int64_t number, int kind,
                 int64_t rank, int64_t size) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    const int64_t shard = plan.at(i).shard;
    float expected = sum_in_rank_order(size, number, i);
    if (kind == 0) expected = element(shard, number, i);
    if (kind == 1 && shard != rank) expected = 0;  // not touched
    wrong += result[static_cast<size_t>(i)] != expected;
  }
  return wrong;
}

TEST(Protocol, MixedCallsBackToBackAreExact) {
  for (const int64_t size : {2, 3, 4}) {
    auto options = group_options(size);
    options.first_epoch = Epoch{0} - 50;  // past the wrap half-way
    expect_success(run_group(Launch::kThreads, options, [&](SymmetricGroup& group) {
      std::mt19937_64 choice(static_cast<uint64_t>(size));  // the same on all ranks
      for (int64_t number = 0; number < 100; ++number) {
        const int kind = static_cast<int>(choice() % 3);
        const int64_t count = static_cast<int64_t>(choice() % 700);
        const int64_t shards = kind == 2 && choice() % 2 == 0 ? 1 : size;
        const ChunkPlan plan{count, shards, static_cast<int64_t>(1 + choice() % 4),
                             static_cast<int64_t>(1 + choice() % 100)};
        const auto result = kind == 0   ? gather(group, plan, number)
                            : kind == 1 ? reduce_scatter(group, plan, number)
                                        : all_reduce(group, plan, number);
        ASSERT_EQ(mistakes(result, plan, number, kind, group.rank(), size), 0)
            << "call " << number << " of kind " << kind << ", " << count << " elements, rank "
            << group.rank();
      }
    }));
  }
}

// Cut or whole, in one shot or two: the additions are the same.
TEST(Protocol, BitsDoNotDependOnThePlan) {
  constexpr int64_t kCount = 1000;
  expect_success(run_group(Launch::kThreads, group_options(4), [&](SymmetricGroup& group) {
    const auto expected = all_reduce(group, {kCount, 4}, 7);
    EXPECT_EQ(all_reduce(group, {kCount, 4, 3, 16}, 7), expected);
    EXPECT_EQ(all_reduce(group, {kCount, 1}, 7), expected);
    EXPECT_EQ(all_reduce(group, {kCount, 1, 4, 64}, 7), expected);
  }));
}

}  // namespace
}  // namespace axonn::comm
