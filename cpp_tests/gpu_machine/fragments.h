// How the lanes of a warp hold the parts of a matrix that tensor cores multiply, and the product
// itself. Source: NVIDIA, PTX ISA 9.0, sections 9.7.14.5 (mma) and 9.7.15.5 (wgmma), whose layouts
// are one: lane l has its elements at row l / 4, and columns that begin at l % 4 times the elements
// of a register.
#pragma once

#include <cstdint>

#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

// What is multiplied. A tf32 is a float of which the hardware reads the upper 19 bits.
enum class Element : uint8_t { kBrain, kHalf, kTf32 };

constexpr int bytes_of(Element element) { return element == Element::kTf32 ? 4 : 2; }

// Turns `count` elements, one behind the other, into floats, which hold each of them exactly.
void widen(Element element, const void* elements, int count, float* floats);

// Accumulators of 16 rows, `columns` of them, in registers of two float16 or of one float32.
struct Sums {
  const Slot* slots;
  int columns;
  bool is_half;

  int num_slots() const { return is_half ? columns / 4 : columns / 2; }
};

// Rows of 16 and columns of A, from `count` registers of each lane; `a` is [16, 4 count] of 16-bit
// elements, [16, 2 count] of tf32.
void gather_rows(Warp& warp, const Slot* slots, int count, Element element, float* a);
// B, [k, 8]: 8 rows for each register of 16-bit elements, 4 of tf32.
void gather_columns(Warp& warp, const Slot* slots, int count, Element element, float* b);
void gather_sums(Warp& warp, const Sums& sums, float* d);
// NaNs become 0x7FFFFFFF; float16 is rounded to nearest, ties to even.
void scatter_sums(Warp& warp, const Sums& sums, const float* d);

// d += a b, where a is [rows, depth], b [depth, columns], and columns a multiple of 8. Hardware
// may add in any order and with fewer bits. Here each product is exact, unless it underflows, and
// products are added to d in float32, from the first of the depth to the last.
void multiply_add(const float* a, const float* b, float* d, int rows, int columns, int depth);

}  // namespace axonn::gpu_machine
