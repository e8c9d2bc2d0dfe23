// Tensor descriptors for TMA, which cuTensorMapEncodeTiled writes and the machine's TMA reads. The
// layout of their 128 bytes is the machine's own; the rules they must satisfy are CUDA's. Source:
// CUDA driver API 13.0, "Tensor Map Object Management"; PTX ISA 9.0, section 5.5.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace axonn::gpu_machine {

inline constexpr uint64_t kTensorMapBytes = 128;
inline constexpr uint32_t kMostTensorDims = 5;

// CUtensorMapDataType, as far as the machine supports its types.
enum class TensorType : uint8_t {
  kUint8,
  kUint16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBFloat16,
};
inline constexpr uint32_t kNumTensorTypes = 10;
// Size of an element in bytes.
uint32_t size_of(TensorType type);

// The first dim is the contiguous one.
struct TensorMap {
  TensorType type = TensorType::kUint8;
  uint32_t rank = 1;
  uint32_t swizzle_bytes = 0;  // span of the swizzle: 0, 32, 64 or 128
  uint64_t base = 0;
  std::array<uint64_t, kMostTensorDims> sizes{};
  std::array<uint64_t, kMostTensorDims> strides{};  // in bytes
  std::array<uint32_t, kMostTensorDims> box{};      // extents in the tensor
  std::array<uint32_t, kMostTensorDims> steps{};    // from one element of a box to the next

  // Number of elements of a box along a dim. The first dim has no steps.
  uint32_t count(uint32_t dim) const {
    return dim == 0 ? box[0] : (box[dim] + steps[dim] - 1) / steps[dim];
  }
  uint64_t box_bytes() const;
};

// The fields of a descriptor that tensormap.replace may change.
enum class MapField : uint8_t {
  kAddress,
  kRank,  // minus one
  kBoxDim,
  kGlobalDim,
  kGlobalStride,
  kElementStride,
  kElementType,  // in PTX's numbering, which differs from CUDA's
  kSwizzle,
};
// The element type with this number in PTX; none if the machine does not support it.
std::optional<TensorType> type_of_ptx(uint64_t number);
// Replaces a field of the descriptor; `ord` is the dim, for fields with one value per dim. Returns
// false if these bytes are not a descriptor. The result may be illegal until more is replaced.
bool replace_field(std::byte* bytes, MapField field, uint32_t ord, uint64_t value);

// The place of a row of a box; a row runs along the first dim.
struct BoxRow {
  uint64_t address = 0;  // of the first byte inside the tensor
  uint32_t skipped = 0;  // bytes of the row before that one, outside the tensor
  uint32_t inside = 0;   // bytes inside; 0 if the whole row is outside
  uint32_t shared = 0;   // offset of the row in shared memory, from the start of the box
};
// The rows of the box at these coordinates, in the order of shared memory.
std::vector<BoxRow> rows_of_box(const TensorMap& map,
                                const std::array<int32_t, kMostTensorDims>& at);
// The swizzled position of the byte at this shared memory address; units of 16 bytes stay together.
inline uint64_t swizzled(uint64_t address, uint32_t swizzle_bytes) {
  if (swizzle_bytes == 0) return address;
  const uint64_t rows = swizzle_bytes / 16 - 1;  // bits that are XORed
  return address ^ ((address >> 7 & rows) << 4);
}

// cuTensorMapEncodeTiled, with CUDA's enum values. Returns CUDA_SUCCESS (0) or
// CUDA_ERROR_INVALID_VALUE (1). Throws std::invalid_argument for what CUDA allows and the machine
// does not support: interleaving, fills other than zero, other types.
int encode_tiled(void* map, int type, uint32_t rank, uint64_t base, const uint64_t* sizes,
                 const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                 int interleave, int swizzle, int l2_promotion, int fill);

// The decoded descriptor; none if these bytes are not a descriptor, or an illegal one.
std::optional<TensorMap> decode_tensor_map(const std::byte* bytes);

}  // namespace axonn::gpu_machine
