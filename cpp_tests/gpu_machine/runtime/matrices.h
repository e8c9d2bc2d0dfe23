// Matrices of small integers, on the host and on devices. Sums of their products are exact in fp32
// in any order, so results are known to the bit.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "core/cuda/check.h"
#include "core/numeric/data_type.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine::testing {

using axonn::cuda::CudaError;
using kernels::DataType;

// Converts a value to bfloat16 or float16.
inline uint16_t narrowed(float value, DataType dtype) {
  return dtype == DataType::kFloat16 ? kernels::Float16::from_float(value).bits
                                     : kernels::BFloat16::from_float(value).bits;
}
inline float widened(uint16_t bits, DataType dtype) {
  return dtype == DataType::kFloat16 ? kernels::Float16{bits}.to_float()
                                     : kernels::BFloat16{bits}.to_float();
}

struct Matrix {
  int64_t rows, columns;
  std::vector<float> values;

  static Matrix zeros(int64_t rows, int64_t columns) {
    return {rows, columns, std::vector<float>(static_cast<size_t>(rows * columns))};
  }
  // Integers from -2 to 2.
  static Matrix random(int64_t rows, int64_t columns, std::mt19937_64& random) {
    Matrix m = zeros(rows, columns);
    for (float& value : m.values) value = static_cast<float>(random() % 5) - 2;
    return m;
  }
  float at(int64_t row, int64_t column) const {
    return values[static_cast<size_t>(row * columns + column)];
  }
  float& at(int64_t row, int64_t column) {
    return values[static_cast<size_t>(row * columns + column)];
  }
  Matrix row_range(int64_t begin, int64_t end) const {
    return {end - begin, columns,
            std::vector<float>(values.begin() + begin * columns, values.begin() + end * columns)};
  }
  Matrix transposed() const {
    Matrix t = zeros(columns, rows);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) t.at(j, i) = at(i, j);
    }
    return t;
  }
  // Rounds every value to bfloat16 or float16.
  Matrix rounded(DataType dtype) const {
    Matrix m = *this;
    for (float& value : m.values) value = widened(narrowed(value, dtype), dtype);
    return m;
  }
  friend Matrix operator*(const Matrix& a, const Matrix& b) {
    Matrix c = zeros(a.rows, b.columns);
    for (int64_t i = 0; i < a.rows; ++i) {
      for (int64_t k = 0; k < a.columns; ++k) {
        const float factor = a.at(i, k);
        for (int64_t j = 0; j < b.columns; ++j) c.at(i, j) += factor * b.at(k, j);
      }
    }
    return c;
  }
  friend Matrix operator+(Matrix a, const Matrix& b) {
    for (size_t i = 0; i < a.values.size(); ++i) a.values[i] += b.values[i];
    return a;
  }
  friend bool operator==(const Matrix&, const Matrix&) = default;
};

// A bfloat16 or float16 matrix on the current device; it is freed with the runtime.
class DeviceMatrix {
 public:
  DeviceMatrix(int64_t rows, int64_t columns, DataType dtype = DataType::kBFloat16)
      : rows_(rows), columns_(columns), dtype_(dtype) {
    AXONN_CUDA_CHECK(cudaMalloc(&data_, bytes()));
  }
  explicit DeviceMatrix(const Matrix& from, DataType dtype = DataType::kBFloat16)
      : DeviceMatrix(from.rows, from.columns, dtype) {
    std::vector<uint16_t> narrow;
    for (const float value : from.values) narrow.push_back(narrowed(value, dtype));
    AXONN_CUDA_CHECK(cudaMemcpy(data_, narrow.data(), bytes(), cudaMemcpyHostToDevice));
  }
  void* data() const { return data_; }
  size_t bytes() const { return static_cast<size_t>(rows_ * columns_) * sizeof(uint16_t); }
  // Throws CudaError if the machine has ended with an error.
  Matrix read() const {
    std::vector<uint16_t> narrow(static_cast<size_t>(rows_ * columns_));
    AXONN_CUDA_CHECK(cudaMemcpy(narrow.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    Matrix m{rows_, columns_, {}};
    for (const uint16_t bits : narrow) m.values.push_back(widened(bits, dtype_));
    return m;
  }

 private:
  int64_t rows_, columns_;
  DataType dtype_;
  void* data_ = nullptr;
};

}  // namespace axonn::gpu_machine::testing
