// Combines the staging slots of a reduction, one per source rank, always in rank order, so that the
// same inputs give the same bits regardless of the ranks' timing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/numeric/data_type.h"

namespace axonn::kernels {

// Sets destination[i] = sources[0][i] (op) sources[1][i] (op) ... for i < count. Floats of 32 bits
// or fewer accumulate in fp32, fp64 in fp64, integers exactly. NaN wins a maximum, as in torch.
// `destination` may be one of the sources. num_sources >= 1.
void reduce_slots(void* destination, const void* const* sources, int64_t num_sources, int64_t count,
                  DataType dtype, ReduceOp op);

}  // namespace axonn::kernels
