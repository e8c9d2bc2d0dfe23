// Sums of several ranks' values, in the ways that NCCL adds.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace axonn::gpu_machine::nccl {

// How floats are added. A ring and a tree round to the dtype at each rank; a switch that adds
// (NVLS) keeps 16-bit floats in float32 and rounds once.
enum class Rounding { kAtEachRank, kOnce };

// Combines the ranks' addends in this order; each has the same number of elements of the dtype. An
// average is the sum, divided at the end.
std::vector<std::byte> combine(const std::vector<const std::vector<std::byte>*>& addends,
                               ncclDataType_t dtype, ncclRedOp_t op, Rounding rounding);

}  // namespace axonn::gpu_machine::nccl
