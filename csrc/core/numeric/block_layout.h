// Describes where a contiguous block of a tensor lies in the whole tensor, row by row. It is C++17,
// because CUDA kernels share it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/numeric/host_device.h"

namespace axonn::kernels {

// Dims that the block covers fully are merged with the preceding one, so that `columns`, the number
// of elements that are contiguous in both the block and the whole tensor, is as large as possible.
struct BlockLayout {
  static constexpr int kMaxDims = 8;  // of rows, after merging

  int64_t rows = 1;
  int64_t columns = 1;
  int64_t first = 0;  // index of the block's first element in the whole tensor
  int num_dims = 0;
  int64_t sizes[kMaxDims] = {};    // of the block; last dim first
  int64_t strides[kMaxDims] = {};  // of the whole tensor

  // Throws std::invalid_argument if the rows still have more than kMaxDims dims.
  static BlockLayout of(const int64_t* full_sizes, const int64_t* offsets, const int64_t* sizes,
                        int64_t num_dims) {
    BlockLayout layout;
    int64_t stride = 1;
    bool in_columns = true;
    for (int64_t d = num_dims; d-- > 0; stride *= full_sizes[d]) {
      layout.first += offsets[d] * stride;
      if (in_columns) {
        layout.columns *= sizes[d];
        in_columns = sizes[d] == full_sizes[d];
        continue;
      }
      layout.rows *= sizes[d];
      if (sizes[d] == 1) continue;
      if (layout.num_dims == kMaxDims) {
        throw std::invalid_argument("a block may be cut along at most " + std::to_string(kMaxDims) +
                                    " dims");
      }
      layout.sizes[layout.num_dims] = sizes[d];
      layout.strides[layout.num_dims++] = stride;
    }
    return layout;
  }

  // Returns the index, in the whole tensor, of the first element of a row of the block.
  AXONN_HOST_DEVICE int64_t row_start(int64_t row) const {
    int64_t start = first;
    for (int d = 0; d < num_dims; ++d) {
      start += row % sizes[d] * strides[d];
      row /= sizes[d];
    }
    return start;
  }
};

}  // namespace axonn::kernels
