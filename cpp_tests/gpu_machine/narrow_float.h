// 16-bit floats, and exact rounding of a double to fewer bits in each direction that PTX has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/numeric/data_type.h"
#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

struct Half {
  static constexpr int kPrecision = 11, kLowest = -14, kHighest = 15;  // bits, exponents
  static constexpr uint16_t kNan = 0x7FFF;
  uint16_t bits;
  double wide() const { return kernels::Float16{bits}.to_float(); }
  static Half exact(float value) { return {kernels::Float16::from_float(value).bits}; }
};
struct Brain {
  static constexpr int kPrecision = 8, kLowest = -126, kHighest = 127;
  static constexpr uint16_t kNan = 0x7FFF;
  uint16_t bits;
  double wide() const { return kernels::BFloat16{bits}.to_float(); }
  static Brain exact(float value) { return {kernels::BFloat16::from_float(value).bits}; }
};

inline double to_integral(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearest:
      return std::nearbyint(value);  // the default mode: to nearest, ties to even
    case Rounding::kZero:
      return std::trunc(value);
    case Rounding::kDown:
      return std::floor(value);
    case Rounding::kUp:
      return std::ceil(value);
  }
  return value;
}

// Returns the value rounded to a T.
template <typename T>
T narrow(double value, Rounding rounding = Rounding::kNearest) {
  if (std::isnan(value)) return {T::kNan};
  if (std::isinf(value) || value == 0) return T::exact(static_cast<float>(value));
  const int exponent = std::max(std::ilogb(value), T::kLowest);
  const int quantum = exponent - T::kPrecision + 1;  // neighbors are 2^quantum apart
  // Multiplying by a power of two is exact: a double has bits to spare.
  const double rounded = std::ldexp(to_integral(std::ldexp(value, -quantum), rounding), quantum);
  const double largest = std::ldexp(2 - std::ldexp(1.0, 1 - T::kPrecision), T::kHighest);
  if (std::abs(rounded) > largest) {
    const bool stays = rounding == Rounding::kZero || (rounding == Rounding::kDown && value > 0) ||
                       (rounding == Rounding::kUp && value < 0);
    const double limit = stays ? largest : HUGE_VAL;
    return T::exact(static_cast<float>(std::copysign(limit, value)));
  }
  return T::exact(static_cast<float>(std::copysign(rounded, value)));
}

// Returns a b + c with the last bit set if bits were lost, so that rounding once more is correct.
// Products of two narrow floats are exact in double.
inline double multiply_add_to_odd(double a, double b, double c) {
  const double product = a * b, sum = product + c;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - product;
  const double lost = (product - (sum - part)) + (c - part);  // Knuth's TwoSum
  if (lost == 0) return sum;
  uint64_t bits = 0;
  std::memcpy(&bits, &sum, sizeof(bits));
  if ((bits & 1) != 0) return sum;
  return std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
}

}  // namespace axonn::gpu_machine
