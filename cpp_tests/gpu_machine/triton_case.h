// Matrices that the project's Triton kernels read and write, and expected products.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gpu_machine/triton_kernel.h"

namespace axonn::gpu_machine::testing {

// A matrix in memory: element (i, j) is at i * row_stride + j * column_stride.
struct Matrix {
  int64_t rows = 0, columns = 0, row_stride = 0, column_stride = 1;
  DataType dtype = DataType::kFloat32;
  std::vector<double> values;  // [rows][columns], exact in the dtype
  uint64_t address = 0;

  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * columns + j)]; }
};

// Random values, not yet placed in memory.
inline Matrix draw_matrix(int64_t rows, int64_t columns, DataType dtype, std::mt19937_64& random) {
  Matrix made{rows, columns, columns, 1, dtype, {}, 0};
  const auto count = static_cast<size_t>(rows * columns);
  const auto bytes = draw(count, dtype, random, 1.0);
  for (size_t i = 0; i < count; ++i) made.values.push_back(value_at(bytes, i, dtype));
  return made;
}

// Writes the elements to memory, leaving the gaps between them unwritten.
inline void place_matrix(Machine& machine, Matrix& matrix, const std::string& name) {
  const auto size = static_cast<uint64_t>(kernels::size_of(matrix.dtype));
  const int64_t last =
      (matrix.rows - 1) * matrix.row_stride + (matrix.columns - 1) * matrix.column_stride;
  matrix.address = machine.memory().allocate(static_cast<uint64_t>(last + 1) * size, name);
  std::vector<std::byte> element(size);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.columns; ++j) {
      put_value(element, 0, matrix.dtype, matrix.at(i, j));
      const int64_t at = i * matrix.row_stride + j * matrix.column_stride;
      machine.memory().write(matrix.address + static_cast<uint64_t>(at) * size, element.data(),
                             size);
    }
  }
}

inline std::vector<double> read_values(Machine& machine, uint64_t address, size_t count,
                                       DataType dtype) {
  const auto bytes =
      machine.get<std::byte>(address, count * static_cast<size_t>(kernels::size_of(dtype)));
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) values.push_back(value_at(bytes, i, dtype));
  return values;
}

// Passes the matrix as a pointer or as a descriptor, as the case requires.
inline void set_matrix(TritonArguments& arguments, const TritonCase& what, const std::string& name,
                       const Matrix& matrix) {
  if (!what.facts.contains(name + ".box")) {
    arguments.set(name, matrix.address);
  } else if (matrix.column_stride == 1) {
    arguments.set_descriptor(what, name, matrix.address, {matrix.rows, matrix.columns},
                             {matrix.row_stride, 1});
  } else {
    arguments.set_descriptor(what, name, matrix.address, {matrix.columns, matrix.rows},
                             {matrix.column_stride, 1});
  }
}

// An exact product, and how far float32 sums in any order may be from it.
struct Expected {
  double value = 0, bound = 0;
};
inline Expected product_at(const Matrix& a, const Matrix& b, int64_t i, int64_t j) {
  Expected result;
  double magnitude = 0;
  for (int64_t k = 0; k < a.columns; ++k) {
    const double product = a.at(i, k) * b.at(k, j);
    result.value += product;
    magnitude += std::abs(product);
  }
  // Each addend goes through at most as many roundings as there are addends.
  result.bound = static_cast<double>(a.columns + 1) * 0x1p-24 * magnitude;
  return result;
}

}  // namespace axonn::gpu_machine::testing
