#include "core/numeric/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace axonn::kernels {
namespace {

template <typename T>
constexpr DataType kDataType = std::is_same_v<T, float>      ? DataType::kFloat32
                               : std::is_same_v<T, double>   ? DataType::kFloat64
                               : std::is_same_v<T, BFloat16> ? DataType::kBFloat16
                                                             : DataType::kInt64;

// The accumulator's type, and the casts to and from it.
float widen(float value) { return value; }
double widen(double value) { return value; }
int64_t widen(int64_t value) { return value; }
float widen(BFloat16 value) { return value.to_float(); }
template <typename T, typename Wide>
T narrow(Wide value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16::from_float(value);
  } else {
    return value;
  }
}

// Magnitudes span 60 binades, so the order of additions shows in the bits.
template <typename T>
T random_value(std::mt19937_64& rng) {
  if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<int64_t>(rng());
  } else {
    const double mantissa = std::uniform_real_distribution<double>(-1, 1)(rng);
    const double value = std::ldexp(mantissa, static_cast<int>(rng() % 60) - 30);
    return narrow<T>(static_cast<decltype(widen(T{}))>(value));
  }
}

template <typename T>
bool is_nan(T value) {
  const auto wide = widen(value);
  return wide != wide;
}

template <typename T>
using Slots = std::vector<std::vector<T>>;

template <typename T>
Slots<T> random_slots(int64_t num_sources, int64_t count, uint64_t seed) {
  std::mt19937_64 rng(seed);
  Slots<T> slots(static_cast<size_t>(num_sources));
  for (auto& slot : slots) {
    for (int64_t i = 0; i < count; ++i) slot.push_back(random_value<T>(rng));
  }
  return slots;
}

// A plain loop over ranks, in rank order.
template <typename T>
std::vector<T> reference(const Slots<T>& slots, ReduceOp op) {
  std::vector<T> result;
  for (size_t i = 0; i < slots[0].size(); ++i) {
    auto total = widen(slots[0][i]);
    for (size_t s = 1; s < slots.size(); ++s) {
      const auto next = widen(slots[s][i]);
      if (op == ReduceOp::kSum) {
        if constexpr (std::is_same_v<T, int64_t>) {
          total = static_cast<int64_t>(static_cast<uint64_t>(total) + static_cast<uint64_t>(next));
        } else {
          total = total + next;
        }
      } else if (next > total || is_nan(next)) {
        total = next;
      }
    }
    result.push_back(narrow<T>(total));
  }
  return result;
}

template <typename T>
void reduce(std::vector<T>& destination, const Slots<T>& slots, ReduceOp op) {
  std::vector<const void*> sources;
  for (const auto& slot : slots) sources.push_back(slot.data());
  reduce_slots(destination.data(), sources.data(), static_cast<int64_t>(sources.size()),
               static_cast<int64_t>(slots[0].size()), kDataType<T>, op);
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}

template <typename T>
class ReduceSlots : public ::testing::Test {};
using DataTypes = ::testing::Types<float, double, BFloat16, int64_t>;
TYPED_TEST_SUITE(ReduceSlots, DataTypes);

// Counts around the edge of a block of accumulators (1024).
constexpr int64_t kCounts[] = {0, 1, 7, 1023, 1024, 1025, 4097};

TYPED_TEST(ReduceSlots, EqualsAPlainLoopInRankOrder) {
  for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
    for (int64_t num_sources = 1; num_sources <= 8; ++num_sources) {
      for (const int64_t count : kCounts) {
        const auto slots = random_slots<TypeParam>(num_sources, count, 17 + count);
        std::vector<TypeParam> result(static_cast<size_t>(count));
        reduce(result, slots, op);
        ASSERT_TRUE(same_bits(result, reference(slots, op)))
            << num_sources << " sources of " << count;
      }
    }
  }
}

// Makes sure that the test above can fail: another order gives other bits.
TEST(ReduceSlotsOrder, ShowsInTheBits) {
  auto slots = random_slots<float>(8, 1000, 3);
  const auto forward = reference(slots, ReduceOp::kSum);
  std::swap(slots[0], slots[5]);
  EXPECT_FALSE(same_bits(reference(slots, ReduceOp::kSum), forward));
}

TYPED_TEST(ReduceSlots, DestinationMayBeAnyOfTheSources) {
  for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
    for (size_t in_place = 0; in_place < 4; ++in_place) {
      auto slots = random_slots<TypeParam>(4, 2500, 5);
      const auto expected = reference(slots, op);
      reduce(slots[in_place], slots, op);
      EXPECT_TRUE(same_bits(slots[in_place], expected)) << "in place of " << in_place;
    }
  }
}

// Slots of uneven parts start at any address, next to the results of other ranks.
TYPED_TEST(ReduceSlots, UnalignedSlotsAndNothingBesideThem) {
  constexpr int64_t kCount = 1500;
  auto slots = random_slots<TypeParam>(3, kCount + 2, 9);
  std::vector<TypeParam> result(kCount + 2, slots[0][0]);
  const auto before = result;
  std::vector<const void*> sources;
  for (auto& slot : slots) sources.push_back(slot.data() + 1);
  reduce_slots(result.data() + 1, sources.data(), 3, kCount, kDataType<TypeParam>, ReduceOp::kSum);
  auto expected = reference(slots, ReduceOp::kSum);
  expected.front() = before.front();
  expected.back() = before.back();
  EXPECT_TRUE(same_bits(result, expected));
}

template <typename T>
class ReduceFloats : public ::testing::Test {};
using FloatTypes = ::testing::Types<float, double, BFloat16>;
TYPED_TEST_SUITE(ReduceFloats, FloatTypes);

TYPED_TEST(ReduceFloats, NaNWinsAMaximumFromAnySource) {
  using Limits = std::numeric_limits<decltype(widen(TypeParam{}))>;
  for (size_t where = 0; where < 3; ++where) {
    auto slots = random_slots<TypeParam>(3, 100, 11);
    slots[where][50] = narrow<TypeParam>(Limits::quiet_NaN());
    slots[(where + 1) % 3][50] = narrow<TypeParam>(Limits::infinity());
    std::vector<TypeParam> result(100);
    reduce(result, slots, ReduceOp::kMax);
    for (size_t i = 0; i < result.size(); ++i) EXPECT_EQ(is_nan(result[i]), i == 50) << i;
    reduce(result, slots, ReduceOp::kSum);
    EXPECT_TRUE(is_nan(result[50]));
  }
}

TYPED_TEST(ReduceSlots, MaximumOfNegativesAndInfinities) {
  using Wide = decltype(widen(TypeParam{}));
  Slots<TypeParam> slots;
  for (const int value : {-3, -1, -2})
    slots.push_back({narrow<TypeParam>(static_cast<Wide>(value))});
  std::vector<TypeParam> result(1);
  reduce(result, slots, ReduceOp::kMax);
  EXPECT_EQ(widen(result[0]), Wide{-1});
  if constexpr (std::numeric_limits<Wide>::has_infinity) {
    slots.push_back({narrow<TypeParam>(-std::numeric_limits<Wide>::infinity())});
    reduce(result, slots, ReduceOp::kMax);
    EXPECT_EQ(widen(result[0]), Wide{-1});
  }
}

// bf16 cannot represent 2^8 + 1: rounding after each source would lose seven ones.
TEST(ReduceSlotsBFloat16, AccumulatesInFloat) {
  Slots<BFloat16> slots(8, {BFloat16::from_float(1.0f)});
  slots[0][0] = BFloat16::from_float(256.0f);
  std::vector<BFloat16> result(1);
  reduce(result, slots, ReduceOp::kSum);
  EXPECT_EQ(result[0].to_float(), 264.0f);  // 263, rounded once to a multiple of 2, ties to even
}

// Subnormals, infinities of both signs, overflow and negative zeros, summed in float and rounded
// once to bfloat16.
TEST(ReduceSlotsBFloat16, SpecialValues) {
  const auto bits = [](uint16_t value) { return BFloat16{value}; };
  const Slots<BFloat16> slots = {
      {bits(0x0001), bits(0x0001), bits(0x7F80), bits(0x7F80), bits(0x7F7F), bits(0x8000)},
      {bits(0x0001), bits(0x8001), bits(0x3F80), bits(0xFF80), bits(0x7F7F), bits(0x8000)}};
  std::vector<BFloat16> result(6);
  reduce(result, slots, ReduceOp::kSum);
  EXPECT_EQ(result[0].bits, 0x0002);  // subnormals are not flushed
  EXPECT_EQ(result[1].bits, 0x0000);
  EXPECT_EQ(result[2].bits, 0x7F80);
  EXPECT_TRUE(is_nan(result[3]));     // inf - inf
  EXPECT_EQ(result[4].bits, 0x7F80);  // overflow
  EXPECT_EQ(result[5].bits, 0x8000);  // -0 + -0
}

TEST(ReduceSlotsInt64, WrapsAround) {
  Slots<int64_t> slots = {{std::numeric_limits<int64_t>::max()}, {1}};
  std::vector<int64_t> result(1);
  reduce(result, slots, ReduceOp::kSum);
  EXPECT_EQ(result[0], std::numeric_limits<int64_t>::min());
}

}  // namespace
}  // namespace axonn::kernels
