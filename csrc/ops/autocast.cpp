#include "ops/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/stack.h>

namespace axonn::ops {
namespace {

using Off = c10::impl::ExcludeDispatchKeyGuard;

template <c10::DeviceType kDevice>
void cast_operands(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  const size_t num_arguments = op.schema().arguments().size();
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& argument = torch::jit::peek(*stack, i, num_arguments);
    if (argument.isTensor()) {
      argument = at::autocast::cached_cast(dtype, argument.toTensor(), kDevice);
    }
  }
  const Off off(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

void leave_operands(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Off off(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

}  // namespace

torch::CppFunction casts_operands(c10::DeviceType device) {
  TORCH_INTERNAL_ASSERT(device == at::kCPU || device == at::kCUDA);
  return device == at::kCPU
             ? torch::CppFunction::makeFromBoxedFunction<&cast_operands<at::kCPU>>()
             : torch::CppFunction::makeFromBoxedFunction<&cast_operands<at::kCUDA>>();
}

torch::CppFunction leaves_operands(c10::DeviceType /*device*/) {
  return torch::CppFunction::makeFromBoxedFunction<&leave_operands>();
}

}  // namespace axonn::ops
