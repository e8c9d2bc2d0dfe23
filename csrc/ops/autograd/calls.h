// Gradients of the ops. They are computed with the same ops, so backward overlaps communication as
// forward does.
//
// An op that leaves a whole tensor on every rank defines, by convention, what the gradient of that
// tensor means. The ranks use the result of matmul_all_reduce alike, so its gradient is whole on
// every rank and nothing is summed. Each rank uses the result of all_reduce in its own way, so the
// ranks' gradients are summed.
//
// The nodes are in C++ because a node in Python costs 30 us more, which is as long as a small
// matmul takes.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>
#include <utility>

namespace axonn::ops::autograd {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Runs the forward pass of a node below autograd, but with grad mode on, as for its caller: a node
// turns it off, and ranks compare which gradients they will need (Signature::gradients).
struct BelowAutograd {
  at::AutoGradMode mode{true};
  at::AutoDispatchBelowADInplaceOrView below;
};

// The last three arguments of most schemas.
struct GroupArguments {
  std::string name;
  int64_t size;
  std::string algorithm;

  void save(AutogradContext* ctx) const {
    ctx->saved_data["group"] = std::make_tuple(name, size, algorithm);
  }
  static GroupArguments load(AutogradContext* ctx) {
    auto [name, size, algorithm] =
        ctx->saved_data["group"].to<std::tuple<std::string, int64_t, std::string>>();
    return {std::move(name), size, std::move(algorithm)};
  }
};

// Returns the op of that name, with the signature of its schema.
template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace axonn::ops::autograd
