// Element types that the core can add up.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace axonn::kernels {

enum class DataType : int32_t { kFloat32, kFloat64, kBFloat16, kInt64 };
enum class ReduceOp : int32_t { kSum, kMax };

constexpr int64_t size_of(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return 4;
    case DataType::kBFloat16:
      return 2;
    case DataType::kFloat64:
    case DataType::kInt64:
      return 8;
  }
  return 0;
}

// Upper half of a float. Rounds to nearest even; a NaN stays one.
struct BFloat16 {
  uint16_t bits;

  static BFloat16 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
    const bool is_nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
    return {static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded)};
  }
  float to_float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

}  // namespace axonn::kernels
