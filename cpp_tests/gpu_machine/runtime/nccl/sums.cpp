#include "gpu_machine/runtime/nccl/sums.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/numeric/data_type.h"

namespace axonn::gpu_machine::nccl {
namespace {

// How values of a dtype are stored, and the type in which they are combined.
template <typename T>
struct Plain {
  using Value = T;
  static constexpr size_t kBytes = sizeof(T);
  static T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static void store(std::byte* to, T value) { std::memcpy(to, &value, sizeof value); }
};
template <typename Narrow>
struct Narrowed {
  using Value = float;
  static constexpr size_t kBytes = 2;
  static float load(const std::byte* from) {
    Narrow narrow;
    std::memcpy(&narrow.bits, from, 2);
    return narrow.to_float();
  }
  static void store(std::byte* to, float value) {
    const Narrow narrow = Narrow::from_float(value);
    std::memcpy(to, &narrow.bits, 2);
  }
};

template <typename T>
T combine_two(T a, T b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <typename Format>
std::vector<std::byte> combine_as(const std::vector<const std::vector<std::byte>*>& addends,
                                  ncclRedOp_t op, Rounding rounding) {
  using Value = typename Format::Value;
  std::vector<std::byte> result(addends.front()->size());
  for (size_t at = 0; at < result.size(); at += Format::kBytes) {
    Value sum = Format::load(addends.front()->data() + at);
    for (size_t i = 1; i < addends.size(); ++i) {
      sum = combine_two(sum, Format::load(addends[i]->data() + at), op);
      if (rounding == Rounding::kOnce) continue;
      Format::store(result.data() + at, sum);
      sum = Format::load(result.data() + at);
    }
    if (op == ncclAvg) sum = static_cast<Value>(sum / static_cast<Value>(addends.size()));
    Format::store(result.data() + at, sum);
  }
  return result;
}

}  // namespace

std::vector<std::byte> combine(const std::vector<const std::vector<std::byte>*>& addends,
                               ncclDataType_t dtype, ncclRedOp_t op, Rounding rounding) {
  switch (dtype) {
    case ncclInt8:
      return combine_as<Plain<int8_t>>(addends, op, rounding);
    case ncclUint8:
      return combine_as<Plain<uint8_t>>(addends, op, rounding);
    case ncclInt32:
      return combine_as<Plain<int32_t>>(addends, op, rounding);
    case ncclUint32:
      return combine_as<Plain<uint32_t>>(addends, op, rounding);
    case ncclInt64:
      return combine_as<Plain<int64_t>>(addends, op, rounding);
    case ncclUint64:
      return combine_as<Plain<uint64_t>>(addends, op, rounding);
    case ncclFloat32:
      return combine_as<Plain<float>>(addends, op, rounding);
    case ncclFloat64:
      return combine_as<Plain<double>>(addends, op, rounding);
    case ncclFloat16:
      return combine_as<Narrowed<kernels::Float16>>(addends, op, rounding);
    case ncclBfloat16:
      return combine_as<Narrowed<kernels::BFloat16>>(addends, op, rounding);
    default:
      throw std::invalid_argument("a dtype that is not summed");
  }
}

}  // namespace axonn::gpu_machine::nccl
