// AdamW's update of a run of elements, in one pass over memory: gradients and weights in their own
// dtype, masters and moments in float (double for float64). The operations and their order are
// those of torch's fused AdamW for CPUs (aten/src/ATen/native/cpu/FusedAdamKernel.cpp of torch 2.11
// to 2.15), so the bits are the same, except those of NaNs; tests compare them.
#pragma once

#include <cstdint>

#include "core/numeric/data_type.h"

namespace axonn::kernels {

// Whether a product is rounded before it is added to something. Torch builds its kernel twice: for
// AVX2, where some multiplications and additions are fused, and for all other processors, unfused.
enum class Products : int32_t { kRounded, kFused };

// The numbers of an update, all in double as in torch's kernel.
struct AdamWNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  double gradient_factor;  // factor applied to gradients first, in the masters' dtype
  double bias1, bias2;     // 1 - beta^step of each beta
  Products products;

  // step: number of updates of the elements, including this one
  static AdamWNumbers of(double lr, double beta1, double beta2, double eps, double weight_decay,
                         double gradient_factor, double step, Products products);
};

// Elements to update. gradient has type `dtype`, and so has weight, which gets the new masters.
// master, exp_avg and exp_avg_sq are float64 if dtype is, else float32. None may overlap.
struct AdamWRun {
  const void* gradient;
  void* master;
  void* exp_avg;
  void* exp_avg_sq;
  void* weight;
  int64_t numel;
  DataType dtype;
};

// Updates the elements [begin, end) of the run. The bits do not depend on how a run is split.
// past_caches: weights are stored past the caches. This avoids reading the memory that they
// overwrite, and pays off if the run is too large for the caches anyway.
void adamw(const AdamWRun& run, const AdamWNumbers& numbers, bool past_caches, int64_t begin,
           int64_t end);

}  // namespace axonn::kernels
