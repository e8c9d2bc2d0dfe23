#include "gpu_machine/tensor_map.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kMagic = 0x70616D726F736E65;
constexpr int kInvalid = 1;  // CUDA_ERROR_INVALID_VALUE
constexpr uint64_t kLargestSize = uint64_t{1} << 32, kLargestStride = uint64_t{1} << 40;
constexpr uint32_t kLargestBox = 256, kMostElementStride = 8;

// As it lies in memory. The sum finds a descriptor of which a part was overwritten.
struct Encoded {
  uint64_t magic;
  uint64_t base;
  uint32_t sizes[kMostTensorDims];  // less one
  uint32_t box[kMostTensorDims];
  uint64_t strides[kMostTensorDims - 1];
  uint8_t type, rank, swizzle_units, unused;
  uint32_t unused_word;
  uint64_t sum;
};
static_assert(sizeof(Encoded) <= kTensorMapBytes);

uint64_t sum_of(Encoded encoded) {
  encoded.sum = 0;
  uint8_t bytes[sizeof(Encoded)];
  std::memcpy(bytes, &encoded, sizeof(bytes));
  uint64_t sum = 14695981039346656037ull;  // FNV-1a
  for (const uint8_t byte : bytes) sum = (sum ^ byte) * 1099511628211ull;
  return sum;
}

void refuse(const std::string& what) {
  throw std::invalid_argument("cuTensorMapEncodeTiled: the machine does not know " + what);
}

bool are_dims_legal(uint32_t rank, uint32_t element, const uint64_t* sizes, const uint64_t* strides,
                    const uint32_t* box, uint32_t swizzle_bytes) {
  for (uint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > kLargestSize || box[i] == 0 || box[i] > kLargestBox) {
      return false;
    }
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= kLargestStride)) return false;
  }
  const uint32_t inner = box[0] * element;
  return inner % 16 == 0 && (swizzle_bytes == 0 || inner <= swizzle_bytes);
}

}  // namespace

uint32_t size_of(TensorType type) {
  switch (type) {
    case TensorType::kUint8:
      return 1;
    case TensorType::kUint16:
    case TensorType::kFloat16:
    case TensorType::kBFloat16:
      return 2;
    case TensorType::kUint32:
    case TensorType::kInt32:
    case TensorType::kFloat32:
      return 4;
    case TensorType::kUint64:
    case TensorType::kInt64:
    case TensorType::kFloat64:
      return 8;
  }
  return 0;
}

uint64_t TensorMap::box_bytes() const {
  uint64_t bytes = size_of(type);
  for (uint32_t i = 0; i < rank; ++i) bytes *= box[i];
  return bytes;
}

int encode_tiled(void* map, int type, uint32_t rank, uint64_t base, const uint64_t* sizes,
                 const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                 int interleave, int swizzle, int l2_promotion, int fill) {
  constexpr int kTypes = 13, kInterleaves = 3, kSwizzles = 4, kPromotions = 4, kFills = 2;
  const auto is_of = [](int value, int count) { return value >= 0 && value < count; };
  if (map == nullptr || reinterpret_cast<uintptr_t>(map) % 64 != 0 || !is_of(type, kTypes) ||
      rank < 1 || rank > kMostTensorDims || base % 16 != 0 || !is_of(interleave, kInterleaves) ||
      !is_of(swizzle, kSwizzles) || !is_of(l2_promotion, kPromotions) || !is_of(fill, kFills)) {
    return kInvalid;
  }
  for (uint32_t i = 0; i < rank; ++i) {
    if (element_strides[i] == 0 || element_strides[i] > kMostElementStride) return kInvalid;
    if (element_strides[i] != 1) refuse("element strides other than 1");
  }
  if (type >= static_cast<int>(kNumTensorTypes)) refuse("this type of elements");
  if (interleave != 0) refuse("interleaved layouts");
  if (fill != 0) refuse("a fill with NaNs");
  const auto element = static_cast<TensorType>(type);
  const uint32_t swizzle_bytes = swizzle == 0 ? 0 : 16u << swizzle;
  if (!are_dims_legal(rank, size_of(element), sizes, strides, box, swizzle_bytes)) return kInvalid;
  Encoded encoded{};
  encoded.magic = kMagic;
  encoded.base = base;
  for (uint32_t i = 0; i < rank; ++i) {
    encoded.sizes[i] = static_cast<uint32_t>(sizes[i] - 1);
    encoded.box[i] = box[i];
    if (i > 0) encoded.strides[i - 1] = strides[i - 1];
  }
  encoded.type = static_cast<uint8_t>(type);
  encoded.rank = static_cast<uint8_t>(rank);
  encoded.swizzle_units = static_cast<uint8_t>(swizzle_bytes / 16);
  encoded.sum = sum_of(encoded);
  std::memset(map, 0, kTensorMapBytes);
  std::memcpy(map, &encoded, sizeof(encoded));
  return 0;
}

std::optional<TensorMap> decode_tensor_map(const std::byte* bytes) {
  Encoded encoded;
  std::memcpy(&encoded, bytes, sizeof(encoded));
  if (encoded.magic != kMagic || encoded.sum != sum_of(encoded)) return std::nullopt;
  TensorMap map;
  map.type = static_cast<TensorType>(encoded.type);
  map.rank = encoded.rank;
  map.swizzle_bytes = encoded.swizzle_units * 16u;
  map.base = encoded.base;
  for (uint32_t i = 0; i < map.rank; ++i) {
    map.sizes[i] = uint64_t{encoded.sizes[i]} + 1;
    map.box[i] = encoded.box[i];
    map.strides[i] = i == 0 ? size_of(map.type) : encoded.strides[i - 1];
  }
  return map;
}

std::vector<BoxRow> rows_of_box(const TensorMap& map,
                                const std::array<int32_t, kMostTensorDims>& at) {
  const uint32_t element = size_of(map.type);
  const auto size = static_cast<int64_t>(map.sizes[0]);
  const int64_t begin = std::clamp<int64_t>(-int64_t{at[0]}, 0, map.box[0]);
  const int64_t end = std::clamp<int64_t>(size - at[0], begin, map.box[0]);
  uint32_t num_rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) num_rows *= map.box[i];
  std::vector<BoxRow> rows(num_rows);
  for (uint32_t number = 0; number < num_rows; ++number) {
    BoxRow& row = rows[number];
    row.shared = number * map.box[0] * element;
    uint64_t address = map.base + static_cast<uint64_t>((at[0] + begin) * element);
    bool is_inside = end > begin;
    for (uint32_t i = 1, rest = number; i < map.rank; rest /= map.box[i], ++i) {
      const int64_t place = int64_t{at[i]} + rest % map.box[i];
      is_inside &= place >= 0 && place < static_cast<int64_t>(map.sizes[i]);
      address += static_cast<uint64_t>(place) * map.strides[i];
    }
    if (!is_inside) continue;
    row.address = address;
    row.skipped = static_cast<uint32_t>(begin) * element;
    row.inside = static_cast<uint32_t>(end - begin) * element;
  }
  return rows;
}

}  // namespace axonn::gpu_machine
