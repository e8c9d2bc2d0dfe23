// The parts of core/symmetric/fused_order.h in real calls, with ranks as threads: calls run back to
// back, and results are compared bit by bit with sums in rank order.
#include "core/symmetric/fused_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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

// Inexact in fp32, so that sums depend on their order.
float element(int64_t rank, int64_t call, int64_t index) {
  return 1.0f / static_cast<float>(3 + 7 * rank + 11 * call + 13 * (index % 101));
}

float sum_in_rank_order(int64_t size, int64_t call, int64_t index) {
  float sum = element(0, call, index);
  for (int64_t rank = 1; rank < size; ++rank) sum += element(rank, call, index);
  return sum;
}

struct Flags {
  Call* call;

  int64_t size() const { return call->size(); }
  void signal(int64_t flag) const { call->signal(flag); }
  void wait(int64_t peer, int64_t flag) const { call->wait(peer, flag); }
};

Call open(SymmetricGroup& group, const char* op, int64_t number, int64_t count) {
  return {group, CallSignature::of(op, {number, count}),
          2 * count * static_cast<int64_t>(sizeof(float))};
}

float* own(const Call& call) { return reinterpret_cast<float*>(call.workspace()); }
const float* of(const Call& call, int64_t peer) {
  return reinterpret_cast<const float*>(call.workspace_of(peer));
}
void write_elements(const Call& call, int64_t number, Range positions) {
  for (int64_t i = positions.begin; i < positions.end; ++i) {
    own(call)[i] = element(call.rank(), number, i);
  }
}

// Shards of `length` elements, each in its place in the whole.
class Gather : GatheredParts<Flags> {
 public:
  Gather(Call& call, int64_t length, int64_t number)
      : GatheredParts(length, 0, call.rank(), call.size()), call_(call) {
    publish({&call}, [&] { write_elements(call, number, range(rank())); });
  }
  std::vector<float> take() {
    std::vector<float> result(static_cast<size_t>(num_parts() * length()));
    visit_own_first([&](int64_t part) {
      EXPECT_EQ(await(part), part != rank());
      const float* theirs = of(call_, part);
      std::copy(theirs + range(part).begin, theirs + range(part).end,
                result.data() + range(part).begin);
    });
    become_whole();
    EXPECT_EQ(range(0), (Range{0, static_cast<int64_t>(result.size())}));
    return result;
  }

 private:
  Call& call_;
};

class Sum : SummedParts<Flags> {
 public:
  Sum(Call& call, int64_t count, Drain drain, bool one_shot)
      : SummedParts(count, 1, drain, call.rank(), call.size(), one_shot),
        call_(call),
        result_(static_cast<size_t>(count)) {
    set_signals({&call});
  }
  std::vector<float> of_all(int64_t number) {
    const bool sums_for_peers = !scatters() && num_parts() > 1;
    const int64_t count = all_rows().size();
    produce([&](int64_t part) { write_elements(call_, number, rows(part)); });
    sum([&](int64_t part) { reduce(rows(part), sums_for_peers ? own(call_) + count : out()); },
        [&](int64_t part) {
          const float* sums = of(call_, part) + count;
          std::copy(sums + rows(part).begin, sums + rows(part).end, out() + rows(part).begin);
        });
    return result_;
  }

 private:
  float* out() { return result_.data(); }
  void reduce(Range positions, float* destination) const {
    std::vector<const void*> sources;
    for (int64_t rank = 0; rank < call_.size(); ++rank) {
      sources.push_back(of(call_, rank) + positions.begin);
    }
    kernels::reduce_slots(destination + positions.begin, sources.data(), call_.size(),
                          positions.size(), kernels::DataType::kFloat32, kernels::ReduceOp::kSum);
  }

  Call& call_;
  std::vector<float> result_;
};

std::vector<float> gather(SymmetricGroup& group, int64_t length, int64_t number) {
  Call call = open(group, "gather", number, length * group.size());
  return Gather(call, length, number).take();
}

std::vector<float> sum(SymmetricGroup& group, int64_t count, Drain drain, bool one_shot,
                       int64_t number) {
  Call call = open(group, "sum", number, count);
  return Sum(call, count, drain, one_shot).of_all(number);
}

// Returns the number of wrong elements.
int64_t mistakes(const std::vector<float>& result, int64_t number, int kind, int64_t rank,
                 int64_t size) {
  const auto count = static_cast<int64_t>(result.size());
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t part = part_at(count, size, i);
    float expected = sum_in_rank_order(size, number, i);
    if (kind == 0) expected = element(part, number, i);
    if (kind == 1 && part != rank) expected = 0;  // left untouched
    wrong += result[static_cast<size_t>(i)] != expected;
  }
  return wrong;
}

TEST(FusedOrder, MixedCallsBackToBackAreExact) {
  for (const int64_t size : {2, 3, 4}) {
    auto options = group_options(size);
    options.first_epoch = Epoch{0} - 50;  // the epochs wrap half-way
    expect_success(run_group(Launch::kThreads, options, [&](SymmetricGroup& group) {
      std::mt19937_64 choice(static_cast<uint64_t>(size));  // the same on all ranks
      for (int64_t number = 0; number < 100; ++number) {
        const int kind = static_cast<int>(choice() % 3);
        const int64_t count = static_cast<int64_t>(choice() % 700);
        const bool one_shot = choice() % 2 == 0;
        const auto result =
            kind == 0 ? gather(group, count / size, number)
                      : sum(group, count, kind == 1 ? Drain::kScatterRows : Drain::kAllReduce,
                            one_shot, number);
        ASSERT_EQ(mistakes(result, number, kind, group.rank(), size), 0)
            << "call " << number << " of kind " << kind << ", " << count << " elements, rank "
            << group.rank();
      }
    }));
  }
}

// The additions are the same in one shot and in two.
TEST(FusedOrder, BitsDoNotDependOnTheNumberOfShots) {
  expect_success(run_group(Launch::kThreads, group_options(4), [&](SymmetricGroup& group) {
    const auto expected = sum(group, 1000, Drain::kAllReduce, false, 7);
    EXPECT_EQ(sum(group, 1000, Drain::kAllReduce, true, 7), expected);
  }));
}

// A factor whose parts are all local.
struct Parts : GatheredParts<Flags> {
  Parts(std::array<int64_t, 2> shard, int64_t dim, int64_t rank, int64_t size)
      : GatheredParts(shard[static_cast<size_t>(dim)], dim, rank, size), sizes(shard) {}

  int64_t size(int64_t d) const {
    return d == dim() ? num_parts() * length() : sizes[static_cast<size_t>(d)];
  }
  Range block(int64_t part, Range rows, Range columns, bool transposed) const {
    const Range cut = (dim() == 0) != transposed ? rows : columns;
    return {part * length() + cut.begin, part * length() + cut.end};
  }

  std::array<int64_t, 2> sizes;
};

// The summed dim is cut into parts in both factors: 3 of 4, and 2 of 6.
TEST(FusedOrder, EveryRankSumsInRankOrder) {
  for (int64_t rank = 0; rank < 3; ++rank) {
    Parts a({5, 4}, 1, rank, 3), b({6, 2}, 0, rank % 2, 2);
    std::vector<Range> left;
    visit_tiles<Parts>({0, 5}, {0, 2}, {a}, {b}, [&](Range, Range, Range k, Range, bool is_first) {
      EXPECT_EQ(is_first, left.empty());
      left.push_back(k);
    });
    EXPECT_EQ(left, (std::vector<Range>{{0, 4}, {4, 6}, {6, 8}, {8, 12}}));
  }
}

// Among rows that are not summed, local ones come first.
TEST(FusedOrder, TilesOfTheOwnPartComeFirst) {
  Parts a({2, 3}, 0, 1, 3), b({3, 4}, 0, 0, 1);
  std::vector<Range> rows;
  visit_tiles<Parts>({1, 6}, {0, 4}, {a}, {b},
                     [&](Range r, Range, Range, Range, bool) { rows.push_back(r); });
  EXPECT_EQ(rows, (std::vector<Range>{{1, 3}, {3, 5}, {0, 1}}));
}

}  // namespace
}  // namespace axonn::comm
