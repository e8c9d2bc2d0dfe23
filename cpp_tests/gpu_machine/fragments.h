// How the lanes of a warp hold the parts of a matrix that tensor cores multiply, and the product
// itself. Source: NVIDIA, PTX ISA 9.0, sections 9.7.14.5 (mma) and 9.7.15.5 (wgmma), which use the
// same layouts: lane l holds elements of row l / 4, in columns that begin at l % 4 times the number
// of elements in a register.
#pragma once

#include <cstdint>

#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

// Element types. A tf32 is a float of which the hardware reads the upper 19 bits.
enum class Element : uint8_t { kBrain, kHalf, kTf32 };

constexpr int bytes_of(Element element) { return element == Element::kTf32 ? 4 : 2; }

// Converts `count` consecutive elements to float, which represents each of them exactly.
void widen(Element element, const void* elements, int count, float* floats);

// Accumulators of 16 rows and `columns` columns, in registers of two float16 or one float32.
struct Sums {
  const Slot* slots;
  int columns;
  bool is_half;

  int num_slots() const { return is_half ? columns / 4 : columns / 2; }
};

// Reads 16 rows of A from `count` registers per lane; `a` is [16, 4 count] for 16-bit elements and
// [16, 2 count] for tf32.
void gather_rows(Warp& warp, const Slot* slots, int count, Element element, float* a);
// Reads B, [k, 8]: each register holds 8 rows of 16-bit elements, or 4 of tf32.
void gather_columns(Warp& warp, const Slot* slots, int count, Element element, float* b);
void gather_sums(Warp& warp, const Sums& sums, float* d);
// Writes NaN as 0x7FFFFFFF; rounds float16 to nearest, ties to even.
void scatter_sums(Warp& warp, const Sums& sums, const float* d);

// d += a b, where a is [rows, depth], b is [depth, columns], and columns is a multiple of 8.
// Hardware may add in any order and with fewer bits. Here each product is exact, unless it
// underflows, and products are added to d in float32, in order of increasing depth.
void multiply_add(const float* a, const float* b, float* d, int rows, int columns, int depth);

}  // namespace axonn::gpu_machine
