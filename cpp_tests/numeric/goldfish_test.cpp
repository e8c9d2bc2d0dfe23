#include "core/numeric/goldfish.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace axonn::kernels {
namespace {

constexpr int64_t kIgnored = -100;

std::vector<int64_t> draw(int64_t count, int64_t below, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  for (auto& token : tokens) token = static_cast<int64_t>(rng() % static_cast<uint64_t>(below));
  return tokens;
}

// Of documents that begin at random places.
std::vector<int64_t> documents(int64_t count, uint64_t seed) {
  auto numbers = draw(count, 12, seed);
  int64_t current = 0;
  for (auto& number : numbers) number = current += number == 0;
  return numbers;
}

std::vector<int64_t> labels(const GoldfishRows& rows, const GoldfishRule& rule) {
  std::vector<int64_t> out(static_cast<size_t>(rows.num_targets()), -1);
  goldfish_labels(rows, rule, kIgnored, 0, rows.num_targets(), out.data());
  return out;
}

TEST(Goldfish, HashesAreThoseOfThePage) {  // docs/memorization.md
  const std::vector<int64_t> zeros(13, 0), sevens(13, 7), large{2147483648, 9223372036854775807};
  const int64_t forth[] = {1, 2, 3}, back[] = {3, 2, 1};
  EXPECT_EQ(goldfish_hash(zeros.data(), 1), 0xE220A8397B1DCDAFu);
  EXPECT_EQ(goldfish_hash(zeros.data(), 13), 0xE8D21ED91B0D911Au);
  EXPECT_EQ(goldfish_hash(sevens.data(), 13), 0x290C744B8FF65701u);
  EXPECT_EQ(goldfish_hash(forth, 3), 0x6AE515C1C0AC7E37u);
  EXPECT_EQ(goldfish_hash(back, 3), 0xD62A7F6E291FEF64u);
  EXPECT_EQ(goldfish_hash(large.data(), 2), 0x006379827CC4F688u);
}

TEST(Goldfish, OneHashInKIsDropped) {
  EXPECT_EQ(GoldfishRule::of(2, 1, false).last_dropped, 0x7FFFFFFFFFFFFFFFu);
  EXPECT_EQ(GoldfishRule::of(4, 1, false).last_dropped, 0x3FFFFFFFFFFFFFFFu);
  EXPECT_EQ(GoldfishRule::of(3, 1, false).last_dropped, 0x5555555555555555u);
}

TEST(Goldfish, LabelsAreTheNextTokensThatTheRuleKeeps) {
  constexpr int64_t kRows = 5, kLength = 61;
  const auto ids = draw(kRows * kLength, 4, 1), numbers = documents(kRows * kLength, 2);
  for (const int64_t* of : {static_cast<const int64_t*>(nullptr), numbers.data()}) {
    for (const bool with_target : {false, true}) {
      for (const int64_t h : {1, 2, 13, 60, 61}) {
        const auto rule = GoldfishRule::of(3, h, with_target);
        const auto got = labels({ids.data(), of, kRows, kLength}, rule);
        int64_t dropped = 0;
        for (int64_t i = 0; i < std::ssize(got); ++i) {
          const int64_t place = i % (kLength - 1) + 1, at = i / (kLength - 1) * kLength + place;
          const bool inside =
              place >= h &&
              (of == nullptr ||
               std::all_of(of + at - h, of + at, [&](int64_t number) { return number == of[at]; }));
          const bool drops =
              inside && goldfish_hash(&ids[static_cast<size_t>(at - h + with_target)], h) <=
                            rule.last_dropped;
          EXPECT_EQ(got[static_cast<size_t>(i)], drops ? kIgnored : ids[static_cast<size_t>(at)]);
          dropped += drops;
        }
        EXPECT_TRUE(dropped > 0 || h > 2);  // longer windows may find no document that long
      }
    }
  }
}

TEST(Goldfish, StretchesTogetherAreTheWhole) {
  constexpr int64_t kRows = 7, kLength = 29;
  const auto ids = draw(kRows * kLength, 100, 3), numbers = documents(kRows * kLength, 4);
  const GoldfishRows rows{ids.data(), numbers.data(), kRows, kLength};
  const auto rule = GoldfishRule::of(2, 2, false);
  const auto whole = labels(rows, rule);
  for (const int64_t step : {1, 5, 28, 29, 100, 1000}) {
    std::vector<int64_t> parts(whole.size(), -1);
    for (int64_t begin = 0; begin < rows.num_targets(); begin += step) {
      const int64_t end = std::min(begin + step, rows.num_targets());
      goldfish_labels(rows, rule, kIgnored, begin, end, parts.data());
    }
    EXPECT_EQ(parts, whole) << step;
  }
}

TEST(Goldfish, RowsWithoutTargets) {
  const int64_t id = 5;
  EXPECT_TRUE(labels({&id, nullptr, 1, 1}, GoldfishRule::of(2, 1, false)).empty());
  EXPECT_TRUE(labels({nullptr, nullptr, 0, 8}, GoldfishRule::of(2, 1, false)).empty());
}

}  // namespace
}  // namespace axonn::kernels
