#include "core/numeric/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace axonn::kernels {
namespace {

// Sizes around torch's vectors and the blocks of 64 elements.
constexpr int64_t kSizes[] = {0, 1, 3, 7, 8, 9, 63, 64, 65, 129, 1003};
constexpr Products kBoth[] = {Products::kRounded, Products::kFused};

template <typename E>
constexpr DataType kType = std::is_same_v<E, double>     ? DataType::kFloat64
                           : std::is_same_v<E, float>    ? DataType::kFloat32
                           : std::is_same_v<E, BFloat16> ? DataType::kBFloat16
                                                         : DataType::kFloat16;
template <typename E>
using Master = std::conditional_t<std::is_same_v<E, double>, double, float>;

template <typename E>
E narrow(Master<E> value) {
  if constexpr (std::is_floating_point_v<E>) {
    return value;
  } else {
    return E::from_float(value);
  }
}

template <typename E>
Master<E> widen(E value) {
  if constexpr (std::is_floating_point_v<E>) {
    return value;
  } else {
    return value.to_float();
  }
}

// Normally distributed tensors of very different magnitudes.
template <typename E>
struct Tensors {
  std::vector<E> gradient, weight;
  std::vector<Master<E>> master, exp_avg, exp_avg_sq;

  explicit Tensors(int64_t numel) {
    std::mt19937_64 rng(static_cast<uint64_t>(numel) + 1);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> exponent(-40, 10);
    const auto draw = [&] { return static_cast<Master<E>>(normal(rng) * std::exp(exponent(rng))); };
    for (int64_t i = 0; i < numel; ++i) {
      gradient.push_back(narrow<E>(draw()));
      weight.push_back(narrow<E>(7));
      master.push_back(draw());
      exp_avg.push_back(draw());
      exp_avg_sq.push_back(std::abs(draw()));
    }
  }
  AdamWRun run() {
    return {gradient.data(),   master.data(), exp_avg.data(),
            exp_avg_sq.data(), weight.data(), static_cast<int64_t>(master.size()),
            kType<E>};
  }
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename E>
void expect_equal(const Tensors<E>& got, const Tensors<E>& expected) {
  EXPECT_TRUE(same_bits(got.exp_avg, expected.exp_avg));
  EXPECT_TRUE(same_bits(got.exp_avg_sq, expected.exp_avg_sq));
  EXPECT_TRUE(same_bits(got.master, expected.master));
  EXPECT_TRUE(same_bits(got.weight, expected.weight));
}

AdamWNumbers numbers(Products products, double beta1 = 0.9) {
  return AdamWNumbers::of(1e-2, beta1, 0.95, 1e-8, 0.1, 0.37, 3, products);
}

// Updates one element after the other, as torch's kernel does; see adamw.h.
template <typename E>
void expected_update(Tensors<E>& t, const AdamWNumbers& n) {
  using T = Master<E>;
  const bool fused = n.products == Products::kFused;
  const auto plus = [&](T a, T b, T c) { return fused ? std::fma(a, b, c) : a * b + c; };
  const size_t vector = 32 / sizeof(T), behind = t.master.size() / vector * vector;
  const T decay =
      static_cast<T>(fused ? std::fma(-n.lr, n.weight_decay, 1.0) : 1 - n.lr * n.weight_decay);
  const T rest1 = static_cast<T>(1 - n.beta1), rest2 = static_cast<T>(1 - n.beta2);
  for (size_t i = 0; i < t.master.size(); ++i) {
    const T g = widen<E>(t.gradient[i]) * static_cast<T>(n.gradient_factor);
    T &m = t.exp_avg[i], &v = t.exp_avg_sq[i], &p = t.master[i];
    m = rest1 < T{0.5} ? plus(rest1, g - m, m) : plus(rest1 - 1, g - m, g);
    const T b2 = static_cast<T>(n.beta2), kept = v * b2, added = rest2 * g;
    v = i < behind ? plus(added, g, kept) : plus(v, b2, added * g);
    const T root = std::sqrt(v) / static_cast<T>(std::sqrt(n.bias2)) + static_cast<T>(n.eps);
    const T moved = static_cast<T>(n.lr / n.bias1) * m;
    p = p * decay;
    p = p - moved / root;
    t.weight[i] = narrow<E>(p);
  }
}

template <typename E>
class AdamW : public testing::Test {};
using Types = testing::Types<float, double, BFloat16, Float16>;
TYPED_TEST_SUITE(AdamW, Types);

TYPED_TEST(AdamW, BitsAreThoseOfOneElementAfterTheOther) {
  for (const Products products : kBoth) {
    for (const double beta1 : {0.9, 0.5, 0.3}) {
      for (const int64_t numel : kSizes) {
        Tensors<TypeParam> got(numel), expected(numel);
        adamw(got.run(), numbers(products, beta1), false, 0, numel);
        expected_update(expected, numbers(products, beta1));
        expect_equal(got, expected);
      }
    }
  }
}

TYPED_TEST(AdamW, CutsChangeNoBit) {
  constexpr int64_t kNumel = 1003;
  for (const Products products : kBoth) {
    for (const bool past_caches : {false, true}) {
      Tensors<TypeParam> whole(kNumel), cut(kNumel);
      adamw(whole.run(), numbers(products), false, 0, kNumel);
      const int64_t places[] = {0, 64, 65, 200, 999, 1001, kNumel};
      for (size_t i = 0; i + 1 < std::size(places); ++i) {
        adamw(cut.run(), numbers(products), past_caches, places[i], places[i + 1]);
      }
      expect_equal(cut, whole);
    }
  }
}

TYPED_TEST(AdamW, OtherElementsStay) {
  Tensors<TypeParam> t(300), before(300);
  adamw(t.run(), numbers(Products::kFused), true, 64, 200);
  for (size_t i = 0; i < 300; ++i) {
    const bool inside = i >= 64 && i < 200;
    EXPECT_EQ(t.master[i] != before.master[i], inside);
    EXPECT_EQ(std::memcmp(&t.weight[i], &before.weight[i], sizeof(TypeParam)) != 0, inside);
  }
}

TEST(AdamWNumbers, BiasesAreThoseOfTheStep) {
  const auto n = AdamWNumbers::of(1e-2, 0.9, 0.5, 1e-8, 0.1, 1, 2, Products::kRounded);
  EXPECT_DOUBLE_EQ(n.bias1, 0.19);
  EXPECT_DOUBLE_EQ(n.bias2, 0.75);
}

TEST(AdamWRun, IntegersAreRefused) {
  AdamWRun run{};
  run.dtype = DataType::kInt64;
  EXPECT_THROW(adamw(run, numbers(Products::kFused), false, 0, 0), std::invalid_argument);
}

}  // namespace
}  // namespace axonn::kernels
