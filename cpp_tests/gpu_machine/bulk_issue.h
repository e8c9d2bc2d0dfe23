// Bulk copy instructions: what a warp does when it runs one.
#pragma once

#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

class Warp;

// Bits of Op::choice for a copy.
inline constexpr uint8_t kMulticast = 1, kTensor = 2, kReduces = 4, kFromShared = 8;

namespace bulk_issue {

void load(const Op& op, Warp& warp, uint32_t mask);
void store(const Op& op, Warp& warp, uint32_t mask);
void commit(const Op& op, Warp& warp, uint32_t mask);
// For waits: Op::choice is 1 if the sources need only have been read.
bool are_groups_ready(const Op& op, Warp& warp, uint32_t mask);
void learn_of_groups(const Op& op, Warp& warp, uint32_t mask);

}  // namespace bulk_issue
}  // namespace axonn::gpu_machine
