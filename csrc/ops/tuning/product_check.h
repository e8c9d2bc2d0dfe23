// Checks whether a way to compute a product gives right results, before it may be chosen.
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
// with those of `reference` and, for kernels, are the same bits twice; returns 1 for the others. A
// way that raises an error gets 1, too. If a way gets 1 for another reason than that it does not
// take the operands, a warning says so. No generator of the user is advanced. While it runs, it
// needs the memory of the operands and of four results.
tuning::Numbers check_products(const std::vector<std::string>& names, const std::string& reference,
                               const at::Tensor& a, const at::Tensor& b,
                               const std::optional<at::Tensor>& bias, Multiply multiply);

}  // namespace axonn::ops
