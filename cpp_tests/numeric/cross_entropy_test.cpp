#include "core/numeric/cross_entropy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace axonn::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DataType kDataTypes[] = {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                                   DataType::kFloat16};
// Sizes around the sixteen lanes and the blocks of 2048 columns.
constexpr int64_t kColumns[] = {1, 2, 15, 16, 17, 31, 33, 2047, 2048, 2049, 5003};

struct Row {
  DataType dtype;
  std::vector<std::byte> bytes;

  Row(const std::vector<double>& values, DataType type) : dtype(type) {
    bytes.resize(values.size() * static_cast<size_t>(size_of(type)));
    for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  int64_t columns() const { return static_cast<int64_t>(bytes.size()) / size_of(dtype); }
  double at(int64_t column) const { return logit_at(bytes.data(), column, dtype); }
  RowStatistics scan() const { return scan_logits(bytes.data(), columns(), dtype); }
  double step() const {  // half the relative distance between neighbors
    return dtype == DataType::kFloat64    ? 0x1p-53
           : dtype == DataType::kFloat32  ? 0x1p-24
           : dtype == DataType::kBFloat16 ? 0x1p-8
                                          : 0x1p-11;
  }
  double unit() const { return dtype == DataType::kFloat64 ? 0x1p-52 : 0x1p-23; }

 private:
  template <typename T>
  void put(size_t i, T value) {
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  void set(size_t i, double value) {
    const auto narrow = static_cast<float>(value);
    if (dtype == DataType::kFloat32) put(i, narrow);
    if (dtype == DataType::kFloat64) put(i, value);
    if (dtype == DataType::kBFloat16) put(i, BFloat16::from_float(narrow));
    if (dtype == DataType::kFloat16) put(i, Float16::from_float(narrow));
  }
};

std::vector<double> draw(int64_t columns, double scale) {
  std::mt19937_64 rng(static_cast<uint64_t>(columns));
  std::normal_distribution<double> normal(0, scale);
  std::vector<double> values(static_cast<size_t>(columns));
  for (auto& value : values) value = normal(rng);
  return values;
}

// Maximum and sum, the latter in double.
RowStatistics reference(const Row& row) {
  double top = -kInfinity, sum = 0;
  for (int64_t c = 0; c < row.columns(); ++c) top = std::max(top, row.at(c));
  for (int64_t c = 0; c < row.columns(); ++c) sum += std::exp(row.at(c) - top);
  return {top, sum};
}

TEST(CrossEntropy, StatisticsEqualThoseInDouble) {
  for (const auto dtype : kDataTypes) {
    for (const int64_t columns : kColumns) {
      for (const double scale : {1.0, 20.0, 1e4, -1.0}) {
        auto values = draw(columns, std::abs(scale));
        if (scale < 0) std::sort(values.begin(), values.end());  // each block has a larger top
        const Row row(values, dtype);
        const auto got = row.scan(), want = reference(row);
        EXPECT_EQ(got.top, want.top);
        // An exponential is off by about two units, and sums of a block by a few more.
        EXPECT_NEAR(got.sum / want.sum, 1, 10 * row.unit()) << name_of(dtype) << " " << columns;
      }
    }
  }
}

TEST(CrossEntropy, GradientEqualsThatInDoubleAlsoInPlace) {
  for (const auto dtype : kDataTypes) {
    for (const int64_t columns : kColumns) {
      for (const int64_t label : {int64_t{-1}, int64_t{0}, columns - 1}) {
        Row row(draw(columns, 3.0), dtype);
        const auto statistics = reference(row);
        std::vector<double> want(static_cast<size_t>(columns));
        for (int64_t c = 0; c < columns; ++c) {
          want[static_cast<size_t>(c)] =
              -0.7 * (std::exp(row.at(c) - statistics.top) / statistics.sum - (c == label));
        }
        Row other(want, dtype);
        cross_entropy_gradient(other.bytes.data(), row.bytes.data(), columns, dtype, statistics,
                               -0.7, label);
        cross_entropy_gradient(row.bytes.data(), row.bytes.data(), columns, dtype, statistics, -0.7,
                               label);
        EXPECT_EQ(row.bytes, other.bytes);
        for (int64_t c = 0; c < columns; ++c) {
          const double wanted = want[static_cast<size_t>(c)];
          const double smallest = dtype == DataType::kFloat16 ? 0x1p-24 : 1e-37;
          EXPECT_NEAR(row.at(c), wanted, row.step() * std::abs(wanted) + 10 * row.unit() + smallest)
              << name_of(dtype) << " " << columns << " " << c;
        }
      }
    }
  }
}

TEST(CrossEntropy, RowsWithoutNumbers) {
  for (const auto dtype : kDataTypes) {
    for (const int64_t columns : {int64_t{1}, int64_t{37}, int64_t{3000}}) {
      const auto size = static_cast<size_t>(columns);
      const auto lowest = Row(std::vector<double>(size, -kInfinity), dtype).scan();
      EXPECT_EQ(lowest.top, -kInfinity);
      EXPECT_EQ(lowest.sum, 0);
      for (const double odd : {std::nan(""), kInfinity}) {
        auto values = draw(columns, 1.0);
        values[size / 2] = odd;
        EXPECT_TRUE(std::isnan(Row(values, dtype).scan().sum)) << name_of(dtype) << " " << odd;
      }
      if (columns == 1) continue;
      auto values = std::vector<double>(size, -kInfinity);
      values[size - 1] = -5;
      EXPECT_EQ(Row(values, dtype).scan().top, -5);
      EXPECT_EQ(Row(values, dtype).scan().sum, 1);
    }
    EXPECT_EQ(Row({}, dtype).scan().sum, 0);
  }
}

TEST(CrossEntropy, EveryNumberOf16BitsIsReadAndWrittenAsItIsConverted) {
  for (const auto dtype : {DataType::kBFloat16, DataType::kFloat16}) {
    // With a sum of 1, the gradient of a row [top, ..., top] is the scale, which is any float.
    std::mt19937_64 rng(7);
    for (int i = 0; i < 2000; ++i) {
      const auto scale = std::ldexp(static_cast<double>(rng() % (1 << 24)) * 0x1p-24,
                                    static_cast<int>(rng() % 44) - 26);
      Row row(std::vector<double>(16, 0.0), dtype);
      cross_entropy_gradient(row.bytes.data(), row.bytes.data(), 16, dtype, {0.0, 1.0}, scale, -1);
      const auto wanted = Row({scale}, dtype).at(0);
      EXPECT_EQ(row.at(3), wanted) << name_of(dtype) << " " << scale;
    }
    // exp(x - x) = 1 for every finite x, be it negative, subnormal or large.
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto half = static_cast<uint16_t>(bits);
      Row row(std::vector<double>(16, 0.0), dtype);
      for (size_t lane = 0; lane < 16; ++lane) std::memcpy(&row.bytes[2 * lane], &half, 2);
      if (!std::isfinite(row.at(0))) continue;
      EXPECT_EQ(row.scan().top, row.at(0)) << bits;
      EXPECT_EQ(row.scan().sum, 16) << bits;
    }
  }
}

}  // namespace
}  // namespace axonn::kernels
