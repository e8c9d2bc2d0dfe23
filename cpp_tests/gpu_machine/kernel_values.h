// Numbers of any dtype in memory, for tests of kernels.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/numeric/cross_entropy.h"
#include "core/numeric/data_type.h"

namespace axonn::gpu_machine::testing {

using kernels::DataType;

inline constexpr DataType kFloats[] = {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                                       DataType::kFloat16};

// The type in the mangled name of a template instance.
inline std::string mangled(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return "If";
    case DataType::kFloat64:
      return "Id";
    case DataType::kBFloat16:
      return "I13__nv_bfloat16";
    case DataType::kFloat16:
      return "I6__half";
    case DataType::kInt64:
      return "Il";
  }
  return "?";
}

inline double value_at(const std::vector<std::byte>& bytes, size_t i, DataType dtype) {
  if (dtype == DataType::kInt64) {
    int64_t value = 0;
    std::memcpy(&value, bytes.data() + i * sizeof(value), sizeof(value));
    return static_cast<double>(value);
  }
  return kernels::logit_at(bytes.data(), static_cast<int64_t>(i), dtype);
}

inline void put_value(std::vector<std::byte>& bytes, size_t i, DataType dtype, double value) {
  const auto put = [&](auto number) {
    std::memcpy(bytes.data() + i * sizeof(number), &number, sizeof(number));
  };
  const auto narrow = static_cast<float>(value);
  if (dtype == DataType::kFloat32) put(narrow);
  if (dtype == DataType::kFloat64) put(value);
  if (dtype == DataType::kBFloat16) put(kernels::BFloat16::from_float(narrow));
  if (dtype == DataType::kFloat16) put(kernels::Float16::from_float(narrow));
  if (dtype == DataType::kInt64) put(static_cast<int64_t>(value * 1e15));
}

inline std::vector<std::byte> draw(size_t count, DataType dtype, std::mt19937_64& random,
                                   double scale) {
  std::vector<std::byte> bytes(count * static_cast<size_t>(kernels::size_of(dtype)));
  std::normal_distribution<double> normal(0, scale);
  for (size_t i = 0; i < count; ++i) put_value(bytes, i, dtype, normal(random));
  return bytes;
}

// Half the relative distance between neighboring numbers.
inline double step_of(DataType dtype) {
  return dtype == DataType::kFloat64    ? 0x1p-53
         : dtype == DataType::kFloat32  ? 0x1p-24
         : dtype == DataType::kBFloat16 ? 0x1p-8
                                        : 0x1p-11;
}

inline void* device_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace axonn::gpu_machine::testing
