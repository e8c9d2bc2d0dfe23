#include "core/numeric/philox.h"

namespace axonn::kernels {
namespace {

template <typename T>
T cast(float value) {
  return static_cast<T>(value);
}
template <>
BFloat16 cast<BFloat16>(float value) {
  return BFloat16::from_float(value);
}
template <>
Float16 cast<Float16>(float value) {
  return Float16::from_float(value);
}

template <typename T>
void fill(T* out, int64_t first_index, int64_t count, const RandomStream& stream) {
  for (int64_t i = 0; i < count;) {
    const int64_t index = first_index + i;
    float block[kRandomLanes];
    draw_random(index / kRandomLanes, stream, block);
    for (int64_t lane = index % kRandomLanes; lane < kRandomLanes && i < count; ++lane, ++i) {
      out[i] = cast<T>(block[lane]);
    }
  }
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
  philox4x32(words, key[0], key[1]);
  return {words[0], words[1], words[2], words[3]};
}

uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return hash;
}

void fill_random(void* out, int64_t first_index, int64_t count, DataType dtype,
                 const RandomStream& stream) {
  switch (dtype) {
    case DataType::kFloat32:
      return fill(static_cast<float*>(out), first_index, count, stream);
    case DataType::kFloat64:
      return fill(static_cast<double*>(out), first_index, count, stream);
    case DataType::kBFloat16:
      return fill(static_cast<BFloat16*>(out), first_index, count, stream);
    case DataType::kInt64:
      return fill(static_cast<int64_t*>(out), first_index, count, stream);
    case DataType::kFloat16:
      return fill(static_cast<Float16*>(out), first_index, count, stream);
  }
}

}  // namespace axonn::kernels
