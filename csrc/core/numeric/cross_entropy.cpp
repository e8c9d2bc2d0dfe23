#include "core/numeric/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#define AXONN_INLINE inline __attribute__((always_inline))

namespace axonn::kernels {
namespace {

// A row is summed in sixteen lanes on every processor. They are one vector or several, as wide as
// the processor's registers, because compilers generate slow code for wider vectors.
constexpr int kLanes = 16;
constexpr int64_t kBlock = 2048;  // at most 8 KiB, which the second pass finds in L1
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Vectors are passed by reference, because by value their ABI would depend on the processor.
template <int kWidth>
struct Vectors {
  typedef float Floats __attribute__((vector_size(kWidth * 4)));
  typedef int32_t Words __attribute__((vector_size(kWidth * 4)));
  typedef uint32_t Unsigned __attribute__((vector_size(kWidth * 4)));
  typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
};
template <int kWidth>
using Floats = typename Vectors<kWidth>::Floats;
template <int kWidth>
using Words = typename Vectors<kWidth>::Words;
template <int kWidth>
using Unsigned = typename Vectors<kWidth>::Unsigned;
template <int kWidth>
using Halves = typename Vectors<kWidth>::Halves;

template <int kWidth>
struct Lanes {
  static constexpr int kParts = kLanes / kWidth;
  Floats<kWidth> parts[kParts];

  AXONN_INLINE void fill(float value) {
    for (auto& part : parts) part = Floats<kWidth>{} + value;
  }
  AXONN_INLINE float at(int lane) const { return parts[lane / kWidth][lane % kWidth]; }
};

// --- Elements as floats, and back ---------------------------------------------------------------

template <int kWidth>
AXONN_INLINE void load(Floats<kWidth>& out, const float* source) {
  std::memcpy(&out, source, sizeof(out));
}
template <int kWidth>
AXONN_INLINE void store(float* target, const Floats<kWidth>& values) {
  std::memcpy(target, &values, sizeof(values));
}

// Same as BFloat16::to_float and from_float.
template <int kWidth>
AXONN_INLINE void load(Floats<kWidth>& out, const BFloat16* source) {
  Halves<kWidth> bits;
  std::memcpy(&bits, source, sizeof(bits));
  out = reinterpret_cast<Floats<kWidth>>(__builtin_convertvector(bits, Words<kWidth>) << 16);
}
template <int kWidth>
AXONN_INLINE void store(BFloat16* target, const Floats<kWidth>& values) {
  const auto words = reinterpret_cast<Words<kWidth>>(values);
  const Words<kWidth> sign = (words >> 16) & 0x8000, magnitude = words & 0x7FFFFFFF;
  // Only magnitudes are rounded, so that no sum overflows a signed number.
  Words<kWidth> bits = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16;
  bits = magnitude > 0x7F800000 ? Words<kWidth>{} + 0x7FC0 : bits;
  const auto halves = __builtin_convertvector(bits | sign, Halves<kWidth>);
  std::memcpy(target, &halves, sizeof(halves));
}

// Same as Float16::to_float and from_float.
template <int kWidth>
AXONN_INLINE void load(Floats<kWidth>& out, const Float16* source) {
  Halves<kWidth> bits;
  std::memcpy(&bits, source, sizeof(bits));
  const auto words = __builtin_convertvector(bits, Words<kWidth>);
  const Words<kWidth> sign = (words & 0x8000) << 16, shifted = (words & 0x7FFF) << 13;
  const auto finite =
      reinterpret_cast<Words<kWidth>>(reinterpret_cast<Floats<kWidth>>(shifted) * 0x1p112f);
  const Words<kWidth> magnitude = (words & 0x7C00) == 0x7C00 ? shifted | 0x7F800000 : finite;
  out = reinterpret_cast<Floats<kWidth>>(sign | magnitude);
}
template <int kWidth>
AXONN_INLINE void store(Float16* target, const Floats<kWidth>& values) {
  const auto words = reinterpret_cast<Words<kWidth>>(values);
  const Words<kWidth> sign = (words >> 16) & 0x8000, magnitude = words & 0x7FFFFFFF;
  const Floats<kWidth> half = Floats<kWidth>{} + 0.5f;
  const auto sum = reinterpret_cast<Floats<kWidth>>(magnitude) + half;
  const Words<kWidth> small =
      reinterpret_cast<Words<kWidth>>(sum) - reinterpret_cast<Words<kWidth>>(half);
  const Words<kWidth> normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  Words<kWidth> bits = magnitude < 0x38800000 ? small : normal;
  bits = magnitude >= 0x47800000 ? Words<kWidth>{} + 0x7C00 : bits;
  bits = magnitude > 0x7F800000 ? Words<kWidth>{} + 0x7E00 : bits;
  const auto halves = __builtin_convertvector(bits | sign, Halves<kWidth>);
  std::memcpy(target, &halves, sizeof(halves));
}

AXONN_INLINE float load_one(float value) { return value; }
AXONN_INLINE float load_one(BFloat16 value) { return value.to_float(); }
AXONN_INLINE float load_one(Float16 value) { return value.to_float(); }

AXONN_INLINE void store_one(float& target, float value) { target = value; }
AXONN_INLINE void store_one(BFloat16& target, float value) { target = BFloat16::from_float(value); }
AXONN_INLINE void store_one(Float16& target, float value) { target = Float16::from_float(value); }

// Loads a row's next lanes. If fewer than sixteen elements are left, the other lanes are -inf,
// which adds nothing.
template <int kWidth, typename T>
AXONN_INLINE void load_lanes(Lanes<kWidth>& out, const T* source, int64_t count) {
  if (count >= kLanes) {
    for (int i = 0; i < out.kParts; ++i) load<kWidth>(out.parts[i], source + i * kWidth);
    return;
  }
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? load_one(source[i]) : -kInfinity;
  for (int i = 0; i < out.kParts; ++i) load<kWidth>(out.parts[i], lanes + i * kWidth);
}

template <int kWidth, typename T>
AXONN_INLINE void store_lanes(T* target, const Lanes<kWidth>& values, int64_t count) {
  if (count >= kLanes) {
    for (int i = 0; i < values.kParts; ++i) store<kWidth>(target + i * kWidth, values.parts[i]);
    return;
  }
  for (int i = 0; i < count; ++i) store_one(target[i], values.at(i));
}

// --- exp ----------------------------------------------------------------------------------------

// Below this, exp is taken as zero: only a little lower, 2^n would not be a normal float.
constexpr float kLeastExponent = -86.9f;

// Sets x = exp(x) for x <= 0 or NaN, with a relative error below 2e-7.
//
// x = n ln 2 + r, with |r| <= ln(2) / 2, and exp(r) is a polynomial. Its coefficients and the two
// parts of ln 2, the first so short that n times it is exact, are those of Cephes.
// Source: Cephes Math Library 2.2, single/expf.c (Moshier, 1992).
template <int kWidth>
AXONN_INLINE void exponential(Floats<kWidth>& x) {
  constexpr float kRound = 0x1.8p23f;  // adding it to a small float leaves the nearest integer
  const Floats<kWidth> shifted = x * 1.44269504f + kRound;
  const Floats<kWidth> n = shifted - kRound;
  const Floats<kWidth> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats<kWidth> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // The lowest bits of `shifted` are those of n, and 2^n has n + 127 as its exponent.
  const Unsigned<kWidth> power = (reinterpret_cast<Unsigned<kWidth>>(shifted) << 23) + (127u << 23);
  const Floats<kWidth> result = p * reinterpret_cast<Floats<kWidth>>(power);
  x = x < kLeastExponent ? Floats<kWidth>{} : result;
}

AXONN_INLINE float exponential_of(float value) {
  constexpr int kWidth = 4;
  Floats<kWidth> x = Floats<kWidth>{} + value;
  exponential<kWidth>(x);
  return x[0];
}

// --- A row --------------------------------------------------------------------------------------

template <int kWidth, typename T>
AXONN_INLINE float top_of(const T* row, int64_t count) {
  Lanes<kWidth> tops, x;
  tops.fill(-kInfinity);
  for (int64_t c = 0; c < count; c += kLanes) {
    load_lanes(x, row + c, count - c);
    for (int i = 0; i < x.kParts; ++i) {
      tops.parts[i] = x.parts[i] > tops.parts[i] ? x.parts[i] : tops.parts[i];
    }
  }
  float top = -kInfinity;
  for (int i = 0; i < kLanes; ++i) top = std::max(top, tops.at(i));
  return top;
}

// Adds a block's exponentials to the lanes' sums. Each block is summed separately first, so that
// errors grow with its size and with the number of blocks, not with their product.
template <int kWidth, typename T>
AXONN_INLINE void add_exponentials(Lanes<kWidth>& total, const T* row, int64_t count, float shift) {
  Lanes<kWidth> sums, x;
  sums.fill(0.0f);
  for (int64_t c = 0; c < count; c += kLanes) {
    load_lanes(x, row + c, count - c);
    for (int i = 0; i < x.kParts; ++i) {
      x.parts[i] -= shift;
      exponential<kWidth>(x.parts[i]);
      sums.parts[i] += x.parts[i];
    }
  }
  for (int i = 0; i < x.kParts; ++i) total.parts[i] += sums.parts[i];
}

template <int kWidth, typename T>
AXONN_INLINE RowStatistics scan(const T* row, int64_t columns) {
  Lanes<kWidth> sums;
  sums.fill(0.0f);
  float top = -kInfinity;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, columns - begin);
    const float block_top = top_of<kWidth>(row + begin, count);
    if (block_top > top) {
      const float factor = exponential_of(top - block_top);
      for (auto& part : sums.parts) part *= factor;
      top = block_top;
    }
    // If all logits so far are -inf, -inf - top would be NaN.
    add_exponentials(sums, row + begin, count, top == -kInfinity ? 0.0f : top);
  }
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums.at(i);
  return {top, sum};
}

template <int kWidth, typename T>
AXONN_INLINE void gradient(T* out, const T* row, int64_t columns, float top, float scale, float dy,
                           int64_t label) {
  const float at_label = label < 0 ? 0.0f : load_one(row[label]);  // read first: `out` may be `row`
  Lanes<kWidth> x;
  for (int64_t c = 0; c < columns; c += kLanes) {
    load_lanes(x, row + c, columns - c);
    for (auto& part : x.parts) {
      part -= top;
      exponential<kWidth>(part);
      part *= scale;
    }
    store_lanes(out + c, x, columns - c);
  }
  if (label >= 0) store_one(out[label], exponential_of(at_label - top) * scale - dy);
}

RowStatistics scan(const double* row, int64_t columns) {
  constexpr double kLow = -std::numeric_limits<double>::infinity();
  double top = kLow, sum = 0;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = std::min(columns, begin + kBlock);
    double block_top = kLow;
    for (int64_t c = begin; c < end; ++c) block_top = std::max(block_top, row[c]);
    if (block_top > top) {
      sum *= std::exp(top - block_top);
      top = block_top;
    }
    const double shift = top == kLow ? 0.0 : top;
    for (int64_t c = begin; c < end; ++c) sum += std::exp(row[c] - shift);
  }
  return {top, sum};
}

void gradient(double* out, const double* row, int64_t columns, double top, double scale, double dy,
              int64_t label) {
  for (int64_t c = 0; c < columns; ++c) {
    out[c] = std::exp(row[c] - top) * scale - (c == label ? dy : 0.0);
  }
}

// --- One binary serves every processor ----------------------------------------------------------

// Defines scan_<name> and gradient_<name> for a target's instruction set.
#define AXONN_DEFINE_ROWS(name, target, width)                                               \
  template <typename T>                                                                      \
  target RowStatistics scan_##name(const T* row, int64_t columns) {                          \
    return scan<width>(row, columns);                                                        \
  }                                                                                          \
  template <typename T>                                                                      \
  target void gradient_##name(T* out, const T* row, int64_t columns, float top, float scale, \
                              float dy, int64_t label) {                                     \
    gradient<width>(out, row, columns, top, scale, dy, label);                               \
  }

AXONN_DEFINE_ROWS(any, , 4)
#if defined(__x86_64__)
AXONN_DEFINE_ROWS(avx2, __attribute__((target("avx2"))), 8)
AXONN_DEFINE_ROWS(avx512, __attribute__((target("avx512f"))), 16)
#endif
#undef AXONN_DEFINE_ROWS

template <typename T>
struct Rows {
  RowStatistics (*scan)(const T*, int64_t) = scan_any<T>;
  void (*gradient)(T*, const T*, int64_t, float, float, float, int64_t) = gradient_any<T>;

  // Returns the functions for this processor.
  static Rows find() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return {scan_avx512<T>, gradient_avx512<T>};
    if (__builtin_cpu_supports("avx2")) return {scan_avx2<T>, gradient_avx2<T>};
#endif
    return {};
  }
};

template <typename T>
const Rows<T> kRows = Rows<T>::find();

[[noreturn]] void refuse(DataType dtype) {
  throw std::invalid_argument(std::string("cross-entropy of ") + name_of(dtype));
}

}  // namespace

RowStatistics scan_logits(const void* row, int64_t columns, DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return kRows<float>.scan(static_cast<const float*>(row), columns);
    case DataType::kFloat64:
      return scan(static_cast<const double*>(row), columns);
    case DataType::kBFloat16:
      return kRows<BFloat16>.scan(static_cast<const BFloat16*>(row), columns);
    case DataType::kFloat16:
      return kRows<Float16>.scan(static_cast<const Float16*>(row), columns);
    case DataType::kInt64:
      break;
  }
  refuse(dtype);
}

double logit_at(const void* row, int64_t column, DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return static_cast<const float*>(row)[column];
    case DataType::kFloat64:
      return static_cast<const double*>(row)[column];
    case DataType::kBFloat16:
      return static_cast<const BFloat16*>(row)[column].to_float();
    case DataType::kFloat16:
      return static_cast<const Float16*>(row)[column].to_float();
    case DataType::kInt64:
      break;
  }
  refuse(dtype);
}

void cross_entropy_gradient(void* out, const void* row, int64_t columns, DataType dtype,
                            const RowStatistics& statistics, double dy, int64_t label) {
  const double top = statistics.top, scale = dy / statistics.sum;
  const auto top_f = static_cast<float>(top), dy_f = static_cast<float>(dy);
  const auto scale_f = static_cast<float>(scale);
  switch (dtype) {
    case DataType::kFloat32:
      return kRows<float>.gradient(static_cast<float*>(out), static_cast<const float*>(row),
                                   columns, top_f, scale_f, dy_f, label);
    case DataType::kFloat64:
      return gradient(static_cast<double*>(out), static_cast<const double*>(row), columns, top,
                      scale, dy, label);
    case DataType::kBFloat16:
      return kRows<BFloat16>.gradient(static_cast<BFloat16*>(out),
                                      static_cast<const BFloat16*>(row), columns, top_f, scale_f,
                                      dy_f, label);
    case DataType::kFloat16:
      return kRows<Float16>.gradient(static_cast<Float16*>(out), static_cast<const Float16*>(row),
                                     columns, top_f, scale_f, dy_f, label);
    case DataType::kInt64:
      break;
  }
  refuse(dtype);
}

}  // namespace axonn::kernels
