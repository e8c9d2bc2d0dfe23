// Under autocast a matmul takes its operands in autocast's dtype, as torch's own do: so also what
// crosses ranks, and the gradients until they come to what was cast. Cast here, once, since below
// some algorithms call torch's matmul and others do not. Collectives alone keep the dtype they get.
#include <ATen/autocast_mode.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <string>

#include "ops/checks.h"

namespace axonn::ops {
namespace {

using Off = c10::impl::ExcludeDispatchKeyGuard;

template <c10::DeviceType kDevice>
void cast_operands(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto dtype = at::autocast::get_autocast_dtype(kDevice);
  TORCH_CHECK_TYPE(is_matmul_dtype(dtype, c10::Device(kDevice)),
                   op.schema().name().substr(std::string("axonn::").size()), ": autocast is to ",
                   dtype, ", expected ", kDevice == at::kCPU ? "" : "float16, ",
                   "bfloat16 or float32");
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

// Operands of a backward pass have the dtype that forward gave them.
void leave_operands(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Off off(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

template <c10::DeviceType kDevice>
void implement(torch::Library& m) {
  for (const char* name : {"all_gather_matmul", "matmul_all_gather_rhs", "matmul_reduce_scatter",
                           "matmul_all_reduce", "linear_forward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_operands<kDevice>>());
  }
  m.impl("linear_backward", torch::CppFunction::makeFromBoxedFunction<&leave_operands>());
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, AutocastCPU, m) { implement<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(axonn, AutocastCUDA, m) { implement<at::kCUDA>(m); }

}  // namespace axonn::ops
