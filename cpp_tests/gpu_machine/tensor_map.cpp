#include "gpu_machine/tensor_map.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kMagic = 0x70616D726F736E65;
constexpr int kInvalid = 1;  // CUDA_ERROR_INVALID_VALUE
constexpr uint64_t kLargestSize = uint64_t{1} << 32, kLargestStride = uint64_t{1} << 40;
constexpr uint32_t kLargestBox = 256, kMostElementStride = 8;

// The layout in memory. The sum detects a descriptor that was partly overwritten.
struct Encoded {
  uint64_t magic;
  uint64_t base;
  uint64_t sizes[kMostTensorDims];
  uint64_t strides[kMostTensorDims - 1];
  uint32_t box[kMostTensorDims];
  uint8_t type, rank, swizzle;
  uint8_t steps[kMostTensorDims];
  uint32_t sum;
  uint64_t unused;
};
static_assert(sizeof(Encoded) == kTensorMapBytes);

uint32_t sum_of(Encoded encoded) {
  encoded.sum = 0;
  uint8_t bytes[sizeof(Encoded)];
  std::memcpy(bytes, &encoded, sizeof(bytes));
  uint32_t sum = 2166136261u;  // FNV-1a
  for (const uint8_t byte : bytes) sum = (sum ^ byte) * 16777619u;
  return sum;
}

uint32_t swizzle_bytes_of(uint32_t swizzle) { return swizzle == 0 ? 0 : 16u << swizzle; }

void refuse(const std::string& what) {
  throw std::invalid_argument("cuTensorMapEncodeTiled: the machine does not know " + what);
}

bool is_legal(const TensorMap& map) {
  if (map.rank < 1 || map.rank > kMostTensorDims || map.base % 16 != 0) return false;
  for (uint32_t i = 0; i < map.rank; ++i) {
    if (map.sizes[i] == 0 || map.sizes[i] > kLargestSize || map.box[i] == 0 ||
        map.box[i] > kLargestBox || map.steps[i] == 0 || map.steps[i] > kMostElementStride) {
      return false;
    }
    if (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] >= kLargestStride)) return false;
  }
  const uint32_t inner = map.box[0] * size_of(map.type);
  return inner % 16 == 0 && (map.swizzle_bytes == 0 || inner <= map.swizzle_bytes);
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
  for (uint32_t i = 0; i < rank; ++i) bytes *= count(i);
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
  if (type >= static_cast<int>(kNumTensorTypes)) refuse("this type of elements");
  if (interleave != 0) refuse("interleaved layouts");
  if (fill != 0) refuse("a fill with NaNs");
  Encoded encoded{};
  encoded.magic = kMagic;
  encoded.base = base;
  for (uint32_t i = 0; i < rank; ++i) {
    encoded.sizes[i] = sizes[i];
    encoded.box[i] = box[i];
    encoded.steps[i] = static_cast<uint8_t>(std::min(element_strides[i], kMostElementStride + 1));
    if (i > 0) encoded.strides[i - 1] = strides[i - 1];
  }
  encoded.type = static_cast<uint8_t>(type);
  encoded.rank = static_cast<uint8_t>(rank);
  encoded.swizzle = static_cast<uint8_t>(swizzle);
  encoded.sum = sum_of(encoded);
  std::byte bytes[kTensorMapBytes];
  std::memcpy(bytes, &encoded, sizeof(encoded));
  if (!decode_tensor_map(bytes)) return kInvalid;
  std::memcpy(map, bytes, sizeof(bytes));
  return 0;
}

std::optional<TensorMap> decode_tensor_map(const std::byte* bytes) {
  Encoded encoded;
  std::memcpy(&encoded, bytes, sizeof(encoded));
  if (encoded.magic != kMagic || encoded.sum != sum_of(encoded)) return std::nullopt;
  TensorMap map;
  map.type = static_cast<TensorType>(encoded.type);
  map.rank = encoded.rank;
  map.swizzle_bytes = swizzle_bytes_of(encoded.swizzle);
  map.base = encoded.base;
  for (uint32_t i = 0; i < kMostTensorDims; ++i) {
    map.sizes[i] = encoded.sizes[i];
    map.box[i] = encoded.box[i];
    map.steps[i] = encoded.steps[i];
    map.strides[i] = i == 0 ? size_of(map.type) : encoded.strides[i - 1];
  }
  if (!is_legal(map)) return std::nullopt;
  return map;
}

std::optional<TensorType> type_of_ptx(uint64_t number) {
  // From .u8 to .bf16; 8 is .f32 with subnormal numbers flushed.
  constexpr std::optional<TensorType> kTypes[] = {
      TensorType::kUint8,  TensorType::kUint16,  TensorType::kUint32,  TensorType::kInt32,
      TensorType::kUint64, TensorType::kInt64,   TensorType::kFloat16, TensorType::kFloat32,
      std::nullopt,        TensorType::kFloat64, TensorType::kBFloat16};
  return number < std::size(kTypes) ? kTypes[number] : std::nullopt;
}

bool replace_field(std::byte* bytes, MapField field, uint32_t ord, uint64_t value) {
  Encoded encoded;
  std::memcpy(&encoded, bytes, sizeof(encoded));
  if (encoded.magic != kMagic || encoded.sum != sum_of(encoded)) return false;
  const auto byte = static_cast<uint8_t>(std::min<uint64_t>(value, 0xFF));  // 0xFF is illegal
  switch (field) {
    case MapField::kAddress:
      encoded.base = value;
      break;
    case MapField::kRank:
      encoded.rank = static_cast<uint8_t>(std::min<uint64_t>(value, kMostTensorDims) + 1);
      break;
    case MapField::kBoxDim:
      encoded.box[ord] = static_cast<uint32_t>(value);
      break;
    case MapField::kGlobalDim:
      encoded.sizes[ord] = value;
      break;
    case MapField::kGlobalStride:
      encoded.strides[ord] = value;
      break;
    case MapField::kElementStride:
      encoded.steps[ord] = byte;
      break;
    case MapField::kElementType:
      encoded.type = static_cast<uint8_t>(type_of_ptx(value).value());
      break;
    case MapField::kSwizzle:
      encoded.swizzle = byte;
      break;
  }
  encoded.sum = sum_of(encoded);
  std::memcpy(bytes, &encoded, sizeof(encoded));
  return true;
}

std::vector<BoxRow> rows_of_box(const TensorMap& map,
                                const std::array<int32_t, kMostTensorDims>& at) {
  const uint32_t element = size_of(map.type);
  const auto size = static_cast<int64_t>(map.sizes[0]);
  const int64_t begin = std::clamp<int64_t>(-int64_t{at[0]}, 0, map.box[0]);
  const int64_t end = std::clamp<int64_t>(size - at[0], begin, map.box[0]);
  uint32_t num_rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) num_rows *= map.count(i);
  std::vector<BoxRow> rows(num_rows);
  for (uint32_t number = 0; number < num_rows; ++number) {
    BoxRow& row = rows[number];
    row.shared = number * map.box[0] * element;
    uint64_t address = map.base + static_cast<uint64_t>((at[0] + begin) * element);
    bool is_inside = end > begin;
    for (uint32_t i = 1, rest = number; i < map.rank; rest /= map.count(i), ++i) {
      const int64_t place = int64_t{at[i]} + int64_t{rest % map.count(i)} * map.steps[i];
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
