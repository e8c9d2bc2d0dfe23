// Random numbers that depend on an element's position, not on the rank that draws it. So every rank
// fills only its own block of a parameter, and all grids get the same bits. This header is C++17,
// because CUDA kernels share it.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11 (Philox-4x32-10).
#pragma once

#include <math.h>

#include <array>
#include <cstdint>
#include <string_view>

#include "core/numeric/data_type.h"
#include "core/numeric/host_device.h"

namespace axonn::kernels {

enum class Distribution : int32_t { kNormal, kUniform };

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// The 64-bit FNV-1a hash; it identifies a parameter's stream.
uint64_t hash_name(std::string_view name);

struct RandomStream {
  uint64_t seed;
  uint64_t stream;  // hash_name of the parameter's full name
  Distribution distribution;
  float a;  // normal: mean    uniform: low, inclusive
  float b;  // normal: standard deviation    uniform: high, reached only by rounding
};

// Sets out[i] = element `first_index + i` of the stream, drawn in fp32 and cast to dtype.
void fill_random(void* out, int64_t first_index, int64_t count, DataType dtype,
                 const RandomStream& stream);

// --- Shared by host and device -----------------------------------------------------------------

inline constexpr int64_t kRandomLanes = 4;  // numbers per counter

// Replaces the counter with its four random words.
AXONN_HOST_DEVICE inline void philox4x32(uint32_t (&c)[4], uint32_t key0, uint32_t key1) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c[3] = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Computes cos(2 pi t) and sin(2 pi t). Unlike its sincos, the device's sincospi needs no local
// memory.
AXONN_HOST_DEVICE inline void turn(float t, float* cosine, float* sine) {
#if defined(__CUDA_ARCH__)
  sincospif(2.0f * t, sine, cosine);
#else
  constexpr float kTwoPi = 6.2831853071795864769f;
  const float angle = kTwoPi * t;
  *cosine = cosf(angle);
  *sine = sinf(angle);
#endif
}

// Draws elements 4 block .. 4 block + 3 of the stream.
AXONN_HOST_DEVICE inline void draw_random(int64_t block, const RandomStream& s,
                                          float (&out)[kRandomLanes]) {
  const auto counter = static_cast<uint64_t>(block);
  uint32_t words[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                       static_cast<uint32_t>(s.stream), static_cast<uint32_t>(s.stream >> 32)};
  philox4x32(words, static_cast<uint32_t>(s.seed), static_cast<uint32_t>(s.seed >> 32));
  constexpr float kScale32 = 1.0f / 4294967296.0f, kScale24 = 1.0f / 16777216.0f;
  if (s.distribution == Distribution::kUniform) {
    for (int i = 0; i < kRandomLanes; ++i) {
      // 24 bits, which a float holds exactly; before scaling, the value is in [0, 1).
      out[i] = s.a + (s.b - s.a) * (static_cast<float>(words[i] >> 8) * kScale24);
    }
    return;
  }
  for (int i = 0; i < kRandomLanes; i += 2) {  // Box-Muller
    // The value is in (0, 1], so the logarithm never sees 0.
    const float unit = (static_cast<float>(words[i]) + 1.0f) * kScale32;
    const float radius = s.b * sqrtf(-2.0f * logf(unit));
    float cosine = 0, sine = 0;
    turn(static_cast<float>(words[i + 1]) * kScale32, &cosine, &sine);
    out[i] = s.a + radius * cosine;
    out[i + 1] = s.a + radius * sine;
  }
}

}  // namespace axonn::kernels
