// Descriptors of tensors for TMA: what cuTensorMapEncodeTiled writes and the machine's TMA reads.
// Their 128 bytes are the machine's own; what they must satisfy is CUDA's. Source: CUDA driver API
// 13.0, "Tensor Map Object Management"; PTX ISA 9.0, section 5.5.
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

// CUtensorMapDataType, up to the types that the machine knows.
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
// Bytes of an element.
uint32_t size_of(TensorType type);

// The first dim is the one whose elements lie one behind the other.
struct TensorMap {
  TensorType type = TensorType::kUint8;
  uint32_t rank = 1;
  uint32_t swizzle_bytes = 0;  // 0, 32, 64 or 128: what is swizzled together
  uint64_t base = 0;
  std::array<uint64_t, kMostTensorDims> sizes{};
  std::array<uint64_t, kMostTensorDims> strides{};  // in bytes
  std::array<uint32_t, kMostTensorDims> box{};      // extents in the tensor
  std::array<uint32_t, kMostTensorDims> steps{};    // from one element of a box to the next

  // Elements of a box along a dim. The first dim knows no steps.
  uint32_t count(uint32_t dim) const {
    return dim == 0 ? box[0] : (box[dim] + steps[dim] - 1) / steps[dim];
  }
  uint64_t box_bytes() const;
};

// What tensormap.replace may change of a descriptor.
enum class MapField : uint8_t {
  kAddress,
  kRank,  // less one
  kBoxDim,
  kGlobalDim,
  kGlobalStride,
  kElementStride,
  kElementType,  // by PTX's numbers, which are not those of CUDA
  kSwizzle,
};
// The type of elements that has this number in PTX; none if the machine does not know it.
std::optional<TensorType> type_of_ptx(uint64_t number);
// Replaces a field of the descriptor, of the dim `ord` where it has one for each. Returns false if
// these bytes are no descriptor. What comes out may be illegal until more is replaced.
bool replace_field(std::byte* bytes, MapField field, uint32_t ord, uint64_t value);

// Where a row of a box lies: elements of the first dim.
struct BoxRow {
  uint64_t address = 0;  // of the first byte inside the tensor
  uint32_t skipped = 0;  // bytes of the row before it, outside the tensor
  uint32_t inside = 0;   // bytes inside; 0 if all of the row is outside
  uint32_t shared = 0;   // offset of the row from the box's beginning in shared memory
};
// The rows of the box at these coordinates, in the order in which they lie in shared memory.
std::vector<BoxRow> rows_of_box(const TensorMap& map,
                                const std::array<int32_t, kMostTensorDims>& at);
// Where the byte at this address of shared memory lies with the swizzle; it moves 16 bytes as one.
inline uint64_t swizzled(uint64_t address, uint32_t swizzle_bytes) {
  if (swizzle_bytes == 0) return address;
  const uint64_t rows = swizzle_bytes / 16 - 1;  // bits that are exchanged
  return address ^ ((address >> 7 & rows) << 4);
}

// cuTensorMapEncodeTiled, with CUDA's numbers for its enums. Returns CUDA_SUCCESS (0) or
// CUDA_ERROR_INVALID_VALUE (1). Throws std::invalid_argument for what CUDA allows and the machine
// does not know: interleaving, fills other than zero, further types.
int encode_tiled(void* map, int type, uint32_t rank, uint64_t base, const uint64_t* sizes,
                 const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                 int interleave, int swizzle, int l2_promotion, int fill);

// What the descriptor says; none if these bytes are no descriptor, or an illegal one.
std::optional<TensorMap> decode_tensor_map(const std::byte* bytes);

}  // namespace axonn::gpu_machine
