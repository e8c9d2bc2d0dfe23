// Decides whether an op needs an autograd node, and refuses what our nodes cannot do.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <initializer_list>

namespace axonn::ops {

// C++ nodes support only derivatives that autograd itself takes; torch.func's gradient transforms
// do not see them.
inline void check_no_transform(const char* op) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (transforms == nullptr) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, op,
        ": torch.func's transforms of gradients (grad, vjp, jacrev, ...) are not supported over "
        "several ranks or with a named algorithm; supported are backward(), torch.autograd.grad, "
        "torch.func.functional_call, and torch.func.vmap of a call without gradients");
  }
}

// Returns whether an op on these tensors needs a node. Raises NotImplementedError, naming the op,
// for requests that a node cannot serve.
inline bool needs_grad(const char* op, std::initializer_list<const at::Tensor*> tensors) {
  bool needed = false;
  for (const auto* t : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!t->_fw_grad(/*level=*/0).defined(), op,
                                ": forward-mode differentiation (torch.func.jvp, jacfwd, "
                                "forward_ad) is not supported; use backward()");
    needed = needed || (c10::GradMode::is_enabled() && t->requires_grad());
  }
  if (needed) check_no_transform(op);
  return needed;
}

}  // namespace axonn::ops
