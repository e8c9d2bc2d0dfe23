// Sums slots with all threads of a rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/numeric/reduce.h"

namespace axonn::ops::cpu {

// Sets destination[i] = sum (or maximum) over sources, in their order, on all threads of this rank.
void reduce_parallel(std::byte* destination, const std::vector<const std::byte*>& sources,
                     int64_t count, c10::ScalarType type, kernels::ReduceOp op);

}  // namespace axonn::ops::cpu
