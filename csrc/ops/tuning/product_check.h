// Checks that a way to compute a product gives correct results, before it may be chosen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <vector>

#include "core/tuning/tuning_plan.h"

namespace axonn::ops {

// Returns a @ b (+ bias), computed in the named way, or nothing if that way does not take such
// operands.
using Multiply = c10::function_ref<std::optional<at::Tensor>(
    const std::string& name, const at::Tensor& a, const at::Tensor& b,
    const std::optional<at::Tensor>& bias)>;

// Returns 0 for each name whose results on random operands, laid out and aligned as these, agree
// with those of `reference` and, for kernels, have the same bits twice. Returns 1 for the others,
// including those that raise an error. A warning is given for each 1, except where the way does not
// take the operands. The user's random generators do not advance. While this runs, it needs the
// memory of the operands and of four results.
tuning::Numbers check_products(const std::vector<std::string>& names, const std::string& reference,
                               const at::Tensor& a, const at::Tensor& b,
                               const std::optional<at::Tensor>& bias, Multiply multiply);

}  // namespace axonn::ops
