// The layout of a matrix for wgmma in shared memory, from its descriptor. Source: PTX ISA 9.0,
// sections 9.7.15.5.1 (layouts and descriptors); NVIDIA, CUTLASS,
// cute/atom/mma_traits_sm90_gmma.hpp (the canonical layouts in units of 16 bytes).
#pragma once

#include <cstdint>
#include <optional>

namespace axonn::gpu_machine {

inline constexpr uint32_t kChunkBytes = 16;

struct MatrixDescriptor {
  uint64_t start = 0;                // in shared memory, in bytes
  uint64_t leading = 0, stride = 0;  // offsets between blocks of 16-byte chunks, in bytes
  uint64_t base = 0;    // the row of the pattern of swizzles at which the matrix begins
  uint64_t chunks = 1;  // per row of the pattern: 8, 4 or 2 (128, 64, 32 bytes); 1: no swizzle

  // Returns nothing for bits that PTX does not define, or if the base does not fit the start.
  static std::optional<MatrixDescriptor> decode(uint64_t bits);

  // The offset in shared memory of a chunk whose elements are neighbors along K: chunk `chunk`
  // along K in row `row` along M or N.
  uint64_t chunk_along_k(uint64_t row, uint64_t chunk) const;
  // The same for elements that are neighbors along M or N.
  uint64_t chunk_along_mn(uint64_t chunk, uint64_t k) const;

 private:
  uint64_t swizzled(uint64_t address) const;
};

}  // namespace axonn::gpu_machine
