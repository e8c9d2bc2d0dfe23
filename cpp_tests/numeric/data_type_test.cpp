#include "core/numeric/data_type.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace axonn::kernels {
namespace {

double value_of(uint16_t bits) {
  if ((bits & 0x7FFF) == 0x7F80) return bits >> 15 ? -0x1p128 : 0x1p128;  // next after the max
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// The nearer of the two neighbors, by distances that are exact in double; ties to even.
uint16_t round_by_distance(float value) {
  const auto below = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);  // toward zero
  const auto above = static_cast<uint16_t>(below + 1);
  const double to_below = std::abs(value - value_of(below));
  const double to_above = std::abs(value_of(above) - value);
  if (to_below != to_above) return to_below < to_above ? below : above;
  return below % 2 == 0 ? below : above;
}

TEST(BFloat16, RoundsToNearestEven) {
  for (uint32_t upper = 0; upper <= 0xFFFF; ++upper) {
    if ((upper & 0x7F80) == 0x7F80) continue;  // infinities and NaNs are tested below
    for (const uint32_t lower : {0x0u, 0x1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const auto value = std::bit_cast<float>(upper << 16 | lower);
      ASSERT_EQ(BFloat16::from_float(value).bits, round_by_distance(value))
          << std::hex << upper << ' ' << lower;
    }
  }
}

TEST(BFloat16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const BFloat16 value{static_cast<uint16_t>(bits)};
    if (std::isnan(value.to_float())) {
      EXPECT_TRUE(std::isnan(BFloat16::from_float(value.to_float()).to_float()));
    } else {
      ASSERT_EQ(BFloat16::from_float(value.to_float()).bits, value.bits);
    }
  }
}

TEST(BFloat16, InfinitiesAndOverflow) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(BFloat16::from_float(kInf).bits, 0x7F80);
  EXPECT_EQ(BFloat16::from_float(-kInf).bits, 0xFF80);
  EXPECT_EQ(BFloat16::from_float(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(BFloat16::from_float(std::bit_cast<float>(0x7F7F7FFFu)).bits, 0x7F7F);
}

// A NaN with a payload only in its lower half must not become an infinity, and the largest one must
// not wrap around to zero.
TEST(BFloat16, ANaNStaysOne) {
  for (const uint32_t bits : {0x7FC00000u, 0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(std::isnan(BFloat16::from_float(std::bit_cast<float>(bits)).to_float()))
        << std::hex << bits;
  }
}

TEST(DataType, Sizes) {
  EXPECT_EQ(size_of(DataType::kFloat32), 4);
  EXPECT_EQ(size_of(DataType::kFloat64), 8);
  EXPECT_EQ(size_of(DataType::kBFloat16), 2);
  EXPECT_EQ(size_of(DataType::kInt64), 8);
  static_assert(sizeof(BFloat16) == 2);
}

// Against the processor's own conversion, if the compiler has the type.
#if defined(__FLT16_MAX__)
uint16_t bits_by_hardware(float value) {
  const auto half = static_cast<_Float16>(value);
  return std::bit_cast<uint16_t>(half);
}

TEST(Float16, EveryHalfSurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xFFFFu; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const float value = half.to_float();
    if ((bits & 0x7FFFu) > 0x7C00u) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_GT(Float16::from_float(value).bits & 0x7FFFu, 0x7C00u) << bits;
      continue;
    }
    ASSERT_EQ(value, static_cast<float>(std::bit_cast<_Float16>(half.bits))) << bits;
    ASSERT_EQ(Float16::from_float(value).bits, bits);
  }
}

TEST(Float16, RoundsAsTheProcessorDoes) {
  // A prime step visits every exponent and all kinds of mantissas, with both signs.
  for (uint64_t word = 0; word <= 0xFFFFFFFFu; word += 104729) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(word));
    if (std::isnan(value)) continue;
    ASSERT_EQ(Float16::from_float(value).bits, bits_by_hardware(value)) << value;
  }
  for (const float value : {65504.0f, 65519.0f, 65520.0f, 65536.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f,
                            0x1p-14f, 0x1.ffcp-15f, 0x1.ffep-15f, 1.0f + 0x1p-11f, -0.0f}) {
    EXPECT_EQ(Float16::from_float(value).bits, bits_by_hardware(value)) << value;
  }
}
#endif

}  // namespace
}  // namespace axonn::kernels
