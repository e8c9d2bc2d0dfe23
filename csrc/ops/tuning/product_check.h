// Whether a way to compute a product can be trusted with it, before it may be chosen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <vector>

#include "core/tuning/tuning_plan.h"

namespace axonn::ops {

// a @ b (+ bias) in one of several ways; nothing where that does not take such operands.
using Multiply = c10::function_ref<std::optional<at::Tensor>(
    const std::string& name, const at::Tensor& a, const at::Tensor& b,
    const std::optional<at::Tensor>& bias)>;

// 0 for the names whose results on random operands, laid out and aligned as these, agree with
// `reference`'s and, for kernels, are the same bits twice, else 1. What raises an error is out,
// too, and what is out for another reason than its operands is warned of. No generator of the
// user's is advanced. Takes, for its duration, the memory of the operands and of four results.
tuning::Numbers check_products(const std::vector<std::string>& names, const std::string& reference,
                               const at::Tensor& a, const at::Tensor& b,
                               const std::optional<at::Tensor>& bias, Multiply multiply);

}  // namespace axonn::ops
