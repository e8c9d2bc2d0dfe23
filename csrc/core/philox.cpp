#include "core/philox.h"

#include <cmath>

namespace axonn::kernels {
namespace {

constexpr int64_t kLanes = 4;  // numbers per counter

constexpr uint32_t low(uint64_t word) { return static_cast<uint32_t>(word); }
constexpr uint32_t high(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

// (0, 1]: the logarithm below never sees 0.
inline float unit(uint32_t word) { return (static_cast<float>(word) + 1.0f) * 0x1p-32f; }

std::array<float, 4> draw(int64_t block, const RandomStream& s) {
  const auto counter = static_cast<uint64_t>(block);
  const auto words = philox4x32({low(counter), high(counter), low(s.stream), high(s.stream)},
                                {low(s.seed), high(s.seed)});
  std::array<float, 4> out;
  if (s.distribution == Distribution::kUniform) {
    for (int64_t i = 0; i < kLanes; ++i) {
      // 24 bits: exactly representable, so [0, 1) before scaling.
      out[i] = s.a + (s.b - s.a) * (static_cast<float>(words[i] >> 8) * 0x1p-24f);
    }
    return out;
  }
  constexpr float kTwoPi = 6.2831853071795864769f;
  for (int64_t i = 0; i < kLanes; i += 2) {  // Box-Muller
    const float radius = s.b * std::sqrt(-2.0f * std::log(unit(words[i])));
    const float angle = kTwoPi * (static_cast<float>(words[i + 1]) * 0x1p-32f);
    out[i] = s.a + radius * std::cos(angle);
    out[i + 1] = s.a + radius * std::sin(angle);
  }
  return out;
}

template <typename T>
T cast(float value) {
  return static_cast<T>(value);
}
template <>
BFloat16 cast<BFloat16>(float value) {
  return BFloat16::from_float(value);
}

template <typename T>
void fill(T* out, int64_t first_index, int64_t count, const RandomStream& stream) {
  for (int64_t i = 0; i < count;) {
    const int64_t index = first_index + i;
    const auto block = draw(index / kLanes, stream);
    for (int64_t lane = index % kLanes; lane < kLanes && i < count; ++lane, ++i) {
      out[i] = cast<T>(block[lane]);
    }
  }
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {high(p1) ^ c[1] ^ k[0], low(p1), high(p0) ^ c[3] ^ k[1], low(p0)};
    k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
  }
  return c;
}

uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return hash;
}

void fill_random(void* out, int64_t first_index, int64_t count, DataType dtype,
                 const RandomStream& stream) {
  switch (dtype) {
    case DataType::kFloat32:
      return fill(static_cast<float*>(out), first_index, count, stream);
    case DataType::kFloat64:
      return fill(static_cast<double*>(out), first_index, count, stream);
    case DataType::kBFloat16:
      return fill(static_cast<BFloat16*>(out), first_index, count, stream);
    case DataType::kInt64:
      return fill(static_cast<int64_t*>(out), first_index, count, stream);
  }
}

}  // namespace axonn::kernels
