// The argument checks of fill_random_, shared by all backends.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

#include "core/numeric/block_layout.h"
#include "core/numeric/philox.h"

namespace axonn::ops {

// Returns where `out` lies as a block of a tensor with `full_sizes`. Raises ValueError if it is no
// block of such a tensor.
inline kernels::BlockLayout block_layout(const char* op, const at::Tensor& out,
                                         at::IntArrayRef full_sizes, at::IntArrayRef offsets) {
  const auto num_dims = static_cast<size_t>(out.dim());
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": out must be contiguous");
  TORCH_CHECK_VALUE(num_dims > 0 && full_sizes.size() == num_dims && offsets.size() == num_dims, op,
                    ": out of shape ", out.sizes(), " needs a size and an offset a dim, got ",
                    full_sizes, " and ", offsets);
  for (size_t d = 0; d < num_dims; ++d) {
    TORCH_CHECK_VALUE(offsets[d] >= 0 && offsets[d] + out.size(d) <= full_sizes[d], op, ": block [",
                      offsets[d], ", ", offsets[d] + out.size(d), ") of dim ", d,
                      " does not lie in [0, ", full_sizes[d], ")");
  }
  try {
    return kernels::BlockLayout::of(full_sizes.data(), offsets.data(), out.sizes().data(),
                                    out.dim());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, op, ": out of shape ", out.sizes(), ": ", error.what());
  }
}

inline kernels::RandomStream random_stream(const char* op, const std::string& name, int64_t seed,
                                           const std::string& distribution, double a, double b) {
  TORCH_CHECK_VALUE(distribution == "normal" || distribution == "uniform", op,
                    ": distribution must be 'normal' or 'uniform', got '", distribution, "'");
  return {
      static_cast<uint64_t>(seed), kernels::hash_name(name),
      distribution == "normal" ? kernels::Distribution::kNormal : kernels::Distribution::kUniform,
      static_cast<float>(a), static_cast<float>(b)};
}

}  // namespace axonn::ops
