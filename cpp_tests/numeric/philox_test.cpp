#include "core/numeric/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace axonn::kernels {
namespace {

using Words = std::array<uint32_t, 4>;

RandomStream normal(uint64_t seed = 1, const char* name = "blocks.0.qkv.weight") {
  return {seed, hash_name(name), Distribution::kNormal, 0.0f, 1.0f};
}

RandomStream uniform(float low = 0.0f, float high = 1.0f) {
  return {7, hash_name("embedding.weight"), Distribution::kUniform, low, high};
}

template <typename T>
std::vector<T> draw(int64_t first, int64_t count, DataType dtype, const RandomStream& stream) {
  std::vector<T> out(static_cast<size_t>(count));
  fill_random(out.data(), first, count, dtype, stream);
  return out;
}

std::vector<float> draw(int64_t first, int64_t count, const RandomStream& stream) {
  return draw<float>(first, count, DataType::kFloat32, stream);
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Source: kat_vectors of Random123 1.14, philox4x32-10.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Source: test vectors of the FNV reference code (Noll), 64-bit FNV-1a.
TEST(Philox, HashOfNames) {
  EXPECT_EQ(hash_name(""), 0xcbf29ce484222325u);
  EXPECT_EQ(hash_name("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(hash_name("foobar"), 0x85944171f73967e8u);
  EXPECT_NE(hash_name("\xff"), hash_name("\x7f"));  // bytes, whether or not char is signed
}

// The definition, in double: element i is lane i % 4 of counter i / 4. Pins down which element gets
// which number, also beyond 2^32 counters.
TEST(Philox, ElementsAreWhereTheDefinitionPutsThem) {
  const RandomStream stream{0x0123456789abcdefu, hash_name("w"), Distribution::kNormal, 0.5f, 2.0f};
  constexpr double kTwoPi = 6.283185307179586;
  for (const int64_t index :
       {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{1003},
        (int64_t{1} << 34) - 1, int64_t{1} << 34, (int64_t{1} << 40) + 6}) {
    const auto counter = static_cast<uint64_t>(index / 4);
    const auto words = philox4x32(
        {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
         static_cast<uint32_t>(stream.stream), static_cast<uint32_t>(stream.stream >> 32)},
        {static_cast<uint32_t>(stream.seed), static_cast<uint32_t>(stream.seed >> 32)});
    const auto pair = static_cast<size_t>(index % 4 / 2 * 2);
    const double radius = std::sqrt(-2 * std::log((words[pair] + 1.0) / 4294967296.0));
    const double angle = kTwoPi * (words[pair + 1] / 4294967296.0);
    const double expected = 0.5 + 2.0 * radius * (index % 2 ? std::sin(angle) : std::cos(angle));
    // fp32 round-off: the angle, up to 2 pi, is off by 2^-22, times a radius of at most 6.7 and the
    // deviation of 2; the rest is smaller.
    EXPECT_NEAR(draw(index, 1, stream)[0], expected, 2 * 6.7 * 0x1p-21) << index;
  }
}

// This property makes weights equal on every grid.
TEST(Philox, AnySplitOfARangeGivesTheSameBits) {
  constexpr int64_t kCount = 103;
  for (const auto& stream : {normal(), uniform(-2.0f, 3.0f)}) {
    for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{6}, (int64_t{1} << 33) + 3}) {
      const auto whole = draw(first, kCount, stream);
      for (int64_t cut = 0; cut <= kCount; ++cut) {
        auto parts = draw(first, cut, stream);
        const auto rest = draw(first + cut, kCount - cut, stream);
        parts.insert(parts.end(), rest.begin(), rest.end());
        ASSERT_TRUE(same_bits(parts, whole)) << "first " << first << ", cut at " << cut;
      }
      for (int64_t i = 0; i < kCount; ++i) {
        ASSERT_TRUE(same_bits(draw(first + i, 1, stream), {whole[static_cast<size_t>(i)]}));
      }
    }
  }
}

TEST(Philox, WritesNothingOutsideItsRange) {
  for (int64_t count = 0; count <= 9; ++count) {
    std::vector<float> out(12, -77.0f);
    fill_random(out.data() + 1, 3, count, DataType::kFloat32, normal());
    EXPECT_EQ(out[0], -77.0f);
    for (size_t i = static_cast<size_t>(count) + 1; i < out.size(); ++i) EXPECT_EQ(out[i], -77.0f);
  }
}

TEST(Philox, OtherDtypesAreCastsOfTheFloats) {
  constexpr int64_t kCount = 1001;
  for (const auto& stream : {normal(), uniform(-2.0f, 3.0f)}) {
    const auto floats = draw(5, kCount, stream);
    const auto doubles = draw<double>(5, kCount, DataType::kFloat64, stream);
    const auto halves = draw<BFloat16>(5, kCount, DataType::kBFloat16, stream);
    for (size_t i = 0; i < floats.size(); ++i) {
      ASSERT_EQ(doubles[i], static_cast<double>(floats[i])) << i;
      ASSERT_EQ(halves[i].bits, BFloat16::from_float(floats[i]).bits) << i;
    }
  }
}

double fraction_where(const std::vector<float>& values, bool (*predicate)(float)) {
  int64_t count = 0;
  for (const float value : values) count += predicate(value);
  return static_cast<double>(count) / static_cast<double>(values.size());
}

// Bounds: 5 standard deviations of the estimate, which a correct generator exceeds for one seed in
// 2 million; the seed is fixed, so the test is not flaky.
TEST(Philox, MomentsOfTheNormalDistribution) {
  constexpr int64_t kCount = 1 << 19;
  const double n = kCount;
  auto stream = normal(123);
  stream.a = 3.0f;
  stream.b = 0.5f;
  auto values = draw(0, kCount, stream);
  for (float& value : values) value = (value - stream.a) / stream.b;

  double moments[5] = {};
  for (const float value : values) {
    double power = 1;
    for (double& moment : moments) {
      moment += power / n;
      power *= value;
    }
  }
  EXPECT_NEAR(moments[1], 0, 5 * std::sqrt(1 / n));   // Var(z) = 1
  EXPECT_NEAR(moments[2], 1, 5 * std::sqrt(2 / n));   // Var(z^2) = 3 - 1
  EXPECT_NEAR(moments[3], 0, 5 * std::sqrt(15 / n));  // Var(z^3) = 15
  EXPECT_NEAR(moments[4], 3, 5 * std::sqrt(96 / n));  // Var(z^4) = 105 - 9

  const auto expect_fraction = [&](double p, bool (*predicate)(float)) {
    EXPECT_NEAR(fraction_where(values, predicate), p, 5 * std::sqrt(p * (1 - p) / n));
  };
  expect_fraction(0.5, [](float z) { return z > 0; });
  expect_fraction(0.3173105, [](float z) { return std::abs(z) > 1; });
  expect_fraction(0.0455003, [](float z) { return std::abs(z) > 2; });
  expect_fraction(0.0026998, [](float z) { return std::abs(z) > 3; });
}

// The two numbers of a Box-Muller pair, and neighbors from two pairs. The variance of a product is
// 1, and that of the squares' (z^2 - 1)(w^2 - 1) is 4; again 5 standard deviations.
TEST(Philox, NeighboursAreUncorrelated) {
  constexpr int64_t kCount = 1 << 18;
  const auto values = draw(0, kCount, normal(5));
  for (const size_t lag : {size_t{1}, size_t{2}, size_t{3}, size_t{4}}) {
    double product = 0, squares = 0;
    const size_t n = values.size() - lag;
    for (size_t i = 0; i < n; ++i) {
      const double z = values[i], w = values[i + lag];
      product += z * w / static_cast<double>(n);
      squares += (z * z - 1) * (w * w - 1) / static_cast<double>(n);
    }
    EXPECT_NEAR(product, 0, 5 / std::sqrt(n)) << lag;
    EXPECT_NEAR(squares, 0, 5 * 2 / std::sqrt(n)) << lag;
  }
}

TEST(Philox, TheUniformDistribution) {
  constexpr int64_t kCount = 1 << 19;
  constexpr size_t kBins = 64;
  const double n = kCount;
  std::vector<double> bins(kBins, 0.0);
  double mean = 0, variance = 0;
  for (const float value : draw(0, kCount, uniform(-1.0f, 3.0f))) {
    ASSERT_GE(value, -1.0f);
    ASSERT_LE(value, 3.0f);
    const double u = (value + 1.0) / 4.0;
    bins[std::min(static_cast<size_t>(u * kBins), kBins - 1)] += 1;
    mean += u / n;
    variance += (u - 0.5) * (u - 0.5) / n;
  }
  EXPECT_NEAR(mean, 0.5, 5 * std::sqrt(1.0 / 12 / n));            // Var(u) = 1/12
  EXPECT_NEAR(variance, 1.0 / 12, 5 * std::sqrt(1.0 / 180 / n));  // Var((u - 1/2)^2) = 1/180
  double chi_squared = 0;
  for (const double bin : bins) chi_squared += (bin - n / kBins) * (bin - n / kBins) / (n / kBins);
  // chi^2 has the degrees of freedom as its mean, and twice that as its variance.
  EXPECT_NEAR(chi_squared, kBins - 1, 5 * std::sqrt(2.0 * (kBins - 1)));
}

TEST(Philox, OtherSeedsAndNamesGiveOtherNumbers) {
  const auto base = draw(0, 64, normal(1, "a"));
  EXPECT_TRUE(same_bits(base, draw(0, 64, normal(1, "a"))));
  for (const auto& other : {normal(2, "a"), normal(1 | (uint64_t{1} << 40), "a"), normal(1, "b")}) {
    const auto values = draw(0, 64, other);
    for (size_t i = 0; i < base.size(); ++i) EXPECT_NE(values[i], base[i]) << i;
  }
}

TEST(Philox, ZeroDeviationIsTheMean) {
  const RandomStream stream{1, 2, Distribution::kNormal, 1.5f, 0.0f};
  for (const float value : draw(0, 100, stream)) EXPECT_EQ(value, 1.5f);
}

}  // namespace
}  // namespace axonn::kernels
