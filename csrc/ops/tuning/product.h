// One matrix product in several ways, and which of them is fastest: the library's choice for the
// layouts it is given can be several times slower than for others (AxoNN, SC'24, section V-C).
// All give the same values within rounding, each the same bits whenever it is repeated.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/gemm/product_variant.h"
#include "ops/group/group.h"

namespace axonn::ops {

// a [M, K] @ b [K, N] -> [M, N], contiguous, plus `bias` [N] in each row, which is added on the way
// out on a GPU. Nothing where that way does not exist here, or does not take these operands.
std::optional<at::Tensor> mm_by(const tuning::ProductName& name, const at::Tensor& a,
                                const at::Tensor& b, const std::optional<at::Tensor>& bias);

// How a product of a Linear is computed.
struct ProductChoice {
  // Whose ranks agree; they must ask for equal products in the same order. Null: always torch's.
  const Group* agree;
  const char* name;  // "mm_forward", "mm_dgrad" or "mm_wgrad"

  // a @ b in the way that a warm-up measured to be fastest, of those whose results it found right;
  // torch's if there was none. Not asked for: products without an element and, on the CPU, those
  // too small for a copy to pay.
  at::Tensor mm(const at::Tensor& a, const at::Tensor& b,
                const std::optional<at::Tensor>& bias = std::nullopt) const;
};

// Settles the choice for a product of this rank alone, and returns the name under which it is kept
// and listed; an empty one for a product that ProductChoice does not ask for.
std::string tune_product(const at::Tensor& a, const at::Tensor& b,
                         const std::optional<at::Tensor>& bias, const std::string& name);

}  // namespace axonn::ops
