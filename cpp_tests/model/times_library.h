// Modelled times of libraries: cuBLAS, NCCL, and both in sequence.
#pragma once

#include "model/times_rates.h"
#include "model/times_work.h"

namespace axonn::times {

// Uses the best of library_tiles, which a library is assumed to find.
double cublas_us(const Work& work, const Rates& rates = kH100);

// `bytes` is the size of the whole gathered (scattered, summed) tensor.
double nccl_gather_us(int64_t bytes, int32_t ranks, const Rates& rates = kH100);
double nccl_sum_us(int64_t bytes, const Rates& rates = kH100);

// The collective and the product in sequence, from one call to the next.
double library_gather_us(const Work& work, const Rates& rates = kH100);
double library_scatter_us(const Work& work, const Rates& rates = kH100);
double library_sum_us(const Work& work, const Rates& rates = kH100);

}  // namespace axonn::times
