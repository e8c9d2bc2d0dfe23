#include "gpu_machine/matrix_descriptor.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kRows = 8;          // in a block of chunks
constexpr uint64_t kPatternShift = 7;  // rows of a pattern are counted in units of 128 bytes
constexpr uint64_t kUndefinedBits = 0x3FF1'C000'C000'C000u;

constexpr uint64_t field(uint64_t bits, int first, int count) {
  return bits >> first & ((uint64_t{1} << count) - 1);
}

}  // namespace

std::optional<MatrixDescriptor> MatrixDescriptor::decode(uint64_t bits) {
  if ((bits & kUndefinedBits) != 0) return std::nullopt;
  MatrixDescriptor result;
  result.start = field(bits, 0, 14) * kChunkBytes;
  result.leading = field(bits, 16, 14) * kChunkBytes;
  result.stride = field(bits, 32, 14) * kChunkBytes;
  result.base = field(bits, 49, 3);
  const uint64_t mode = field(bits, 62, 2);
  result.chunks = mode == 0 ? 1 : uint64_t{16} >> mode;  // 1: 128 bytes, 2: 64, 3: 32
  const uint64_t row = result.start >> kPatternShift;
  if (((row - result.base) & (result.chunks - 1)) != 0) return std::nullopt;
  return result;
}

// The row within the pattern changes the chunk's position within the row.
uint64_t MatrixDescriptor::swizzled(uint64_t address) const {
  const uint64_t row = (address >> kPatternShift) - base;
  return address ^ (row & (chunks - 1)) * kChunkBytes;
}

uint64_t MatrixDescriptor::chunk_along_k(uint64_t row, uint64_t chunk) const {
  const uint64_t next = chunks == 1 ? leading : kChunkBytes;
  return swizzled(start + row % kRows * chunks * kChunkBytes + row / kRows * stride + chunk * next);
}

uint64_t MatrixDescriptor::chunk_along_mn(uint64_t chunk, uint64_t k) const {
  const uint64_t along_mn = chunks == 1 ? stride : leading;
  const uint64_t along_k = chunks == 1 ? leading : stride;
  return swizzled(start + chunk % chunks * kChunkBytes + chunk / chunks * along_mn +
                  k % kRows * chunks * kChunkBytes + k / kRows * along_k);
}

}  // namespace axonn::gpu_machine
