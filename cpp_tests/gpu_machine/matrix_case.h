// Elements and registers for the tests of instructions on matrices.
#pragma once

#include <string>
#include <vector>

#include "core/numeric/data_type.h"
#include "gpu_machine/program.h"

namespace axonn::gpu_machine::testing {

struct Place {
  int row, column;
};

inline int bytes_in(const std::string& type) { return type == "bf16" || type == "f16" ? 2 : 4; }
inline uint32_t bits_in(const std::string& type, float value) {
  return type == "bf16"  ? kernels::BFloat16::from_float(value).bits
         : type == "f16" ? kernels::Float16::from_float(value).bits
                         : kernels::bits_of(value);
}
inline float value_in(const std::string& type, uint32_t bits) {
  return type == "bf16"  ? kernels::BFloat16{static_cast<uint16_t>(bits)}.to_float()
         : type == "f16" ? kernels::Float16{static_cast<uint16_t>(bits)}.to_float()
                         : kernels::float_of(bits);
}

// Appends a matrix with this many columns as 32-bit registers, [register][lane]; `place` tells
// which element of the matrix a lane's element i is.
template <typename PlaceOf>
void append_fragments(std::vector<uint32_t>& words, const std::vector<float>& matrix, int columns,
                      const std::string& type, const PlaceOf& place, int elements) {
  const int per = 4 / bytes_in(type);
  for (int i = 0; i < elements; i += per) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t word = 0;
      for (int part = 0; part < per; ++part) {
        const Place at = place(lane, i + part);
        word |= bits_in(type, matrix[static_cast<size_t>(at.row * columns + at.column)])
                << (16 * part);
      }
      words.push_back(word);
    }
  }
}

// "{%r10,%r11}"
inline std::string registers(int first, int count, const std::string& name = "%r") {
  std::string text = "{";
  for (int i = 0; i < count; ++i) {
    text += (i == 0 ? "" : ",") + name + std::to_string(first + i);
  }
  return text + "}";
}

// Small integers, so that every sum of a few hundred products is exact in every type.
template <typename Random>
std::vector<float> draw_small(int count, Random& random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
  return values;
}

}  // namespace axonn::gpu_machine::testing
