#include "ops/cpu/reduce_slots.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <limits>

#include "ops/reduce_slots.h"

namespace axonn::ops::cpu {

void reduce_parallel(std::byte* destination, const std::vector<const std::byte*>& sources,
                     int64_t count, c10::ScalarType type, kernels::ReduceOp op) {
  constexpr int64_t kGrain = 32768;  // with fewer elements, a thread costs more than it saves
  const auto dtype = data_type(type);
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t offset = begin * kernels::size_of(dtype);
    std::vector<const void*> shifted;
    for (const auto* source : sources) shifted.push_back(source + offset);
    kernels::reduce_slots(destination + offset, shifted.data(),
                          static_cast<int64_t>(shifted.size()), end - begin, dtype, op);
  });
}

namespace {

at::Tensor reduce_slots(const at::Tensor& slots) {
  const auto call = SlotSum::of(slots, std::numeric_limits<int64_t>::max());
  reduce_parallel(static_cast<std::byte*>(call.sum.mutable_data_ptr()), call.slots,
                  call.sum.numel(), slots.scalar_type(), kernels::ReduceOp::kSum);
  return call.sum;
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kReduceSlots, &reduce_slots); }

}  // namespace axonn::ops::cpu
