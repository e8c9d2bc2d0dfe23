// Random numbers that depend on where an element is, not on who draws it: every rank fills just its
// own block of a parameter and all grids get the same bits.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11 (Philox-4x32-10).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "core/data_type.h"

namespace axonn::kernels {

enum class Distribution : int32_t { kNormal, kUniform };

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// FNV-1a, 64 bits: names a parameter's stream.
uint64_t hash_name(std::string_view name);

struct RandomStream {
  uint64_t seed;
  uint64_t stream;  // hash_name of the parameter's full name
  Distribution distribution;
  float a;  // normal: mean    uniform: low, inclusive
  float b;  // normal: standard deviation    uniform: high, reached only by rounding
};

// out[i] = element `first_index + i` of the stream, drawn in fp32 and cast to dtype.
void fill_random(void* out, int64_t first_index, int64_t count, DataType dtype,
                 const RandomStream& stream);

}  // namespace axonn::kernels
