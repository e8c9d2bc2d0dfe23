#include "gpu_machine/fragments.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "core/numeric/data_type.h"
#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kTf32Bits = 0xFFFFE000u;
constexpr uint32_t kNan = 0x7FFFFFFFu;

// Has no branches, so that the compiler can vectorize it.
inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7FFFu;
  uint32_t bits = kernels::bits_of(kernels::float_of(magnitude << 13) * 0x1p112f);
  bits |= magnitude >= 0x7C00u ? 0x7F800000u : 0u;
  return kernels::float_of(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

int per_register(Element element) { return 4 / bytes_of(element); }

// Several columns of one row: enough columns that sums do not wait for each other.
template <int kColumns>
void add_products(const float* a, const float* b, float* d, int pitch, int depth) {
  float sums[kColumns];
  std::memcpy(sums, d, sizeof(sums));
  for (int k = 0; k < depth; ++k) {
    for (int j = 0; j < kColumns; ++j) sums[j] += a[k] * b[k * pitch + j];
  }
  std::memcpy(d, sums, sizeof(sums));
}

}  // namespace

void widen(Element element, const void* elements, int count, float* floats) {
  if (element == Element::kTf32) {
    const auto* words = static_cast<const uint32_t*>(elements);
    for (int i = 0; i < count; ++i) floats[i] = kernels::float_of(words[i] & kTf32Bits);
    return;
  }
  const auto* words = static_cast<const uint16_t*>(elements);
  if (element == Element::kHalf) {
    for (int i = 0; i < count; ++i) floats[i] = half_to_float(words[i]);
  } else {
    for (int i = 0; i < count; ++i) {
      floats[i] = kernels::float_of(static_cast<uint32_t>(words[i]) << 16);
    }
  }
}

void gather_rows(Warp& warp, const Slot* slots, int count, Element element, float* a) {
  const int per = per_register(element), depth = 2 * per * count;
  float wide[2 * kLanes];
  for (int i = 0; i < count; ++i) {
    widen(element, warp.lanes<std::byte>(slots[i]), per * kLanes, wide);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4 + 8 * (i % 2), column = per * (lane % 4 + 4 * (i / 2));
      std::memcpy(a + row * depth + column, wide + per * lane, sizeof(float) * per);
    }
  }
}

void gather_columns(Warp& warp, const Slot* slots, int count, Element element, float* b) {
  const int per = per_register(element);
  float wide[2 * kLanes];
  for (int i = 0; i < count; ++i) {
    widen(element, warp.lanes<std::byte>(slots[i]), per * kLanes, wide);
    for (int j = 0; j < per * kLanes; ++j) {
      const int lane = j / per, row = per * (lane % 4 + 4 * i) + j % per;
      b[row * 8 + lane / 4] = wide[j];
    }
  }
}

void gather_sums(Warp& warp, const Sums& sums, float* d) {
  float wide[2 * kLanes];
  for (int i = 0; i < sums.num_slots(); ++i) {
    const auto* registers = warp.lanes<std::byte>(sums.slots[i]);
    if (sums.is_half) {
      widen(Element::kHalf, registers, 2 * kLanes, wide);
      for (int lane = 0; lane < kLanes; ++lane) {
        float* place = d + (lane / 4 + 8 * (i % 2)) * sums.columns + 8 * (i / 2) + 2 * (lane % 4);
        std::memcpy(place, wide + 2 * lane, 2 * sizeof(float));
      }
      continue;
    }
    std::memcpy(wide, registers, sizeof(float) * kLanes);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      d[row * sums.columns + column] = wide[lane];
    }
  }
}

void scatter_sums(Warp& warp, const Sums& sums, const float* d) {
  for (int i = 0; i < sums.num_slots(); ++i) {
    auto* registers = warp.lanes<uint32_t>(sums.slots[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (sums.is_half) {
        const float* place =
            d + (lane / 4 + 8 * (i % 2)) * sums.columns + 8 * (i / 2) + 2 * (lane % 4);
        const auto bits_of = [](float value) -> uint32_t {
          return std::isnan(value) ? kNan & 0xFFFFu : kernels::Float16::from_float(value).bits;
        };
        registers[lane] = bits_of(place[0]) | bits_of(place[1]) << 16;
      } else {
        const int row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        const float value = d[row * sums.columns + column];
        registers[lane] = std::isnan(value) ? kNan : kernels::bits_of(value);
      }
    }
  }
}

void multiply_add(const float* a, const float* b, float* d, int rows, int columns, int depth) {
  for (int row = 0; row < rows; ++row) {
    int first = 0;
    const auto step = [&](auto block) {
      for (; first + block <= columns; first += block) {
        add_products<block>(a + row * depth, b + first, d + row * columns + first, columns, depth);
      }
    };
    step(std::integral_constant<int, 32>{});
    step(std::integral_constant<int, 8>{});
  }
}

}  // namespace axonn::gpu_machine
