#include "core/gemm/product_variant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "core/tuning/tuning_cache.h"

namespace axonn::tuning {
namespace {

const CublasLtConfig kHopper{.id = 66,
                             .tile = 20,
                             .stages = 36,
                             .split_k = 1,
                             .reduction = 0,
                             .swizzle = 1,
                             .custom = 3,
                             .inner_shape = 2,
                             .cluster_shape = 5};

TEST(ProductVariant, NamesAreReadAsTheyAreWritten) {
  std::vector<ProductName> names;
  for (const auto variant : kLayoutVariants) names.push_back({variant, ""});
  names.push_back({Variant::kFusedSm90, ""});
  names.push_back({Variant::kCublasLt, to_text(kHopper)});
  names.push_back({Variant::kTriton, "m128n256k64w8s3g8p1t"});
  std::set<std::string> texts;
  for (const auto& name : names) {
    const auto text = to_text(name);
    EXPECT_TRUE(texts.insert(text).second) << text;
    const auto read = parse_product(text);
    ASSERT_TRUE(read.has_value()) << text;
    EXPECT_EQ(*read, name) << text;
  }
  EXPECT_TRUE(texts.contains("cublaslt_66_20_36_1_0_1_3_2_5"));
  EXPECT_TRUE(texts.contains("triton_m128n256k64w8s3g8p1t"));
  EXPECT_TRUE(texts.contains("fused_sm90"));
}

TEST(ProductVariant, OtherTextsNameNothing) {
  for (const auto* text : {"", "fast", "direct_1", "directly", "cublaslt", "cublaslt_", "triton",
                           "triton_", "triton_m 1", "cublaslt_1 2", "triton_m1\n", "fused_sm90_1",
                           "cublaslt66", "triton_{}", "Direct"}) {
    EXPECT_FALSE(parse_product(text).has_value()) << text;
  }
}

TEST(ProductVariant, EveryNumberOfAnAlgorithmIsPartOfItsName) {
  std::set<std::string> texts{to_text(kHopper)};
  for (auto number :
       {&CublasLtConfig::id, &CublasLtConfig::tile, &CublasLtConfig::stages,
        &CublasLtConfig::split_k, &CublasLtConfig::reduction, &CublasLtConfig::swizzle,
        &CublasLtConfig::custom, &CublasLtConfig::inner_shape, &CublasLtConfig::cluster_shape}) {
    auto other = kHopper;
    other.*number += 1;
    EXPECT_TRUE(texts.insert(to_text(other)).second) << to_text(other);
  }
  EXPECT_EQ(texts.size(), 10u);
}

TEST(ProductVariant, NamesSurviveTheDisk) {
  const auto algorithm = to_text(ProductName{Variant::kCublasLt, to_text(kHopper)});
  const Record record{"mm_forward a=bfloat16[8,8] cublaslt=130100 triton=3.8.0",
                      algorithm,
                      {{"direct", 2.0}, {algorithm, 1.5}, {"triton_m64n64k64w4s5g8p2", 1.75}}};
  const auto read = decode(encode(record, {"a GPU", "2.14.1", "0.1.0"}));
  EXPECT_EQ(read.algorithm, algorithm);
  EXPECT_EQ(read.median_us, record.median_us);
  EXPECT_TRUE(parse_product(read.algorithm).has_value());
}

// --- What counts as right ------------------------------------------------------------------------

constexpr double kBf16 = 0x1p-7, kFloat = 0x1p-23, kDouble = 0x1p-52;

// The nearest number with a mantissa of this precision.
double rounded(double value, double epsilon) {
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::round(mantissa / epsilon) * epsilon, exponent);
}

// Dot products of k terms, each summed in two orders, in floats or doubles.
template <typename Sum>
struct Dots {
  Dots(int64_t k, int count, double epsilon) {
    std::mt19937_64 random(k);
    std::normal_distribution<double> normal;
    for (int dot = 0; dot < count; ++dot) {
      Sum forward = 0, backward = 0;
      std::vector<Sum> terms;
      for (int64_t i = 0; i < k; ++i) {
        terms.push_back(
            static_cast<Sum>(rounded(normal(random), epsilon) * rounded(normal(random), epsilon)));
      }
      for (const Sum term : terms) forward += term;
      for (auto term = terms.rbegin(); term != terms.rend(); ++term) backward += *term;
      first.push_back(rounded(forward, epsilon));
      second.push_back(rounded(backward, epsilon));
      shorter.push_back(rounded(
          forward - std::accumulate(terms.begin(), terms.begin() + k / 8, Sum{0}), epsilon));
    }
  }

  static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
    return largest;
  }

  std::vector<double> first, second, shorter;  // the last one lacks an eighth of the terms
};

template <typename Sum>
void expect_tells_rounding_from_errors(double epsilon) {
  for (const int64_t k : {8, 64, 512, 2048}) {
    const Dots<Sum> dots(k, 100, epsilon);
    const double tolerance = tolerated_difference(epsilon, k, std::is_same_v<Sum, double>);
    EXPECT_LE(dots.distance(dots.first, dots.second), tolerance / 2) << k;
    EXPECT_GT(dots.distance(dots.first, dots.shorter), tolerance) << k;
  }
}

TEST(ProductCheck, TellsRoundingFromAMissingPartOfK) {
  expect_tells_rounding_from_errors<float>(kBf16);
  expect_tells_rounding_from_errors<float>(kFloat);
  expect_tells_rounding_from_errors<double>(kDouble);
}

TEST(ProductCheck, WhatIsToleratedIsFarBelowWhatIsAdded) {
  for (int64_t k = 1; k <= 1 << 16; k *= 2) {
    EXPECT_LT(tolerated_difference(kBf16, k, false), 0.2 * std::sqrt(k)) << k;
    EXPECT_LT(tolerated_difference(kFloat, k, false), 0.002 * std::sqrt(k)) << k;
    EXPECT_LT(tolerated_difference(kDouble, k, true), 1e-11 * std::sqrt(k)) << k;
  }
}

}  // namespace
}  // namespace axonn::tuning
