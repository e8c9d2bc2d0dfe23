// The checks and preparation of _reduce_slots, shared by all backends.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <vector>

#include "ops/checks.h"

namespace axonn::ops {

inline constexpr auto kReduceSlots = "_reduce_slots";

// A result that is not filled yet, and the address of each slot.
struct SlotSum {
  at::Tensor sum;
  std::vector<const std::byte*> slots;

  // Raises ValueError or TypeError for slots that no kernel takes.
  static SlotSum of(const at::Tensor& slots, int64_t max_slots) {
    check_reducible(kReduceSlots, "slots", slots);
    TORCH_CHECK_VALUE(slots.dim() >= 1 && slots.is_contiguous(), kReduceSlots,
                      ": slots must be contiguous, with shape [W, ..], got ", slots.sizes(),
                      " with strides ", slots.strides());
    TORCH_CHECK_VALUE(slots.size(0) >= 1 && slots.size(0) <= max_slots, kReduceSlots,
                      ": there must be 1 to ", max_slots, " slots, got ", slots.size(0));
    SlotSum call{at::empty(slots.sizes().slice(1), slots.options()), {}};
    const auto* data = static_cast<const std::byte*>(slots.const_data_ptr());
    for (int64_t slot = 0; slot < slots.size(0); ++slot) {
      call.slots.push_back(data + slot * call.sum.nbytes());
    }
    return call;
  }
};

}  // namespace axonn::ops
