// Element types that the core can sum. This header is C++17, because CUDA kernels share it.
#pragma once

#include <cstdint>
#include <cstring>

namespace axonn::kernels {

enum class DataType : int32_t { kFloat32, kFloat64, kBFloat16, kInt64, kFloat16 };
enum class ReduceOp : int32_t { kSum, kMax };

constexpr int64_t size_of(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return 4;
    case DataType::kBFloat16:
    case DataType::kFloat16:
      return 2;
    case DataType::kFloat64:
    case DataType::kInt64:
      return 8;
  }
  return 0;
}

constexpr const char* name_of(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kInt64:
      return "int64";
    case DataType::kFloat16:
      return "float16";
  }
  return "?";
}

inline uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The upper half of a float. Conversion rounds to nearest even; a NaN stays a NaN.
struct BFloat16 {
  uint16_t bits;

  static BFloat16 from_float(float value) {
    const uint32_t word = bits_of(value);
    const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
    const bool is_nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
    return {static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded)};
  }
  float to_float() const { return float_of(static_cast<uint32_t>(bits) << 16); }
};

// IEEE binary16. Conversion rounds to nearest even, and beyond 65504 to infinity; a NaN stays a
// NaN.
struct Float16 {
  uint16_t bits;

  static Float16 from_float(float value) {
    const uint32_t word = bits_of(value), magnitude = word & 0x7FFFFFFFu;
    uint32_t half = 0;
    if (magnitude > 0x7F800000u) {
      half = 0x7E00u;
    } else if (magnitude >= 0x47800000u) {  // 65536
      half = 0x7C00u;
    } else if (magnitude < 0x38800000u) {
      // Below 2^-14, halves are multiples of 2^-24, as are floats from 0.5 on; so adding 0.5
      // rounds.
      half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    } else {  // the bias changes from 127 to 15, and 13 bits are dropped
      half = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return {static_cast<uint16_t>(half | ((word >> 16) & 0x8000u))};
  }
  float to_float() const {
    const uint32_t sign = (bits & 0x8000u) << 16, shifted = (bits & 0x7FFFu) << 13;
    const bool finite = (bits & 0x7C00u) != 0x7C00u;
    // The multiplication changes the bias. It is exact, even for subnormal numbers.
    const uint32_t magnitude =
        finite ? bits_of(float_of(shifted) * 0x1p112f) : (shifted | 0x7F800000u);
    return float_of(sign | magnitude);
  }
};

}  // namespace axonn::kernels
