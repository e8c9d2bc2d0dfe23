// Computes one matrix product in several ways and chooses the fastest: for some layouts the
// library's own choice can be several times slower than for others (AxoNN, SC'24, section V-C). All
// ways agree within rounding. Kernels repeat their bits; a CPU library's may depend on addresses.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/gemm/product_variant.h"
#include "ops/group/group.h"

namespace axonn::ops {

// Returns a [M, K] @ b [K, N] -> [M, N], contiguous, plus `bias` [N] in each row, which a GPU adds
// within the product. Returns nothing if the named way does not exist here or does not take these
// operands.
std::optional<at::Tensor> mm_by_name(const tuning::ProductName& name, const at::Tensor& a,
                                     const at::Tensor& b, const std::optional<at::Tensor>& bias);

// How a product of a Linear is computed.
struct ProductChoice {
  // The group whose ranks agree; they must ask for equal products in the same order. If null, the
  // product is always torch's.
  const Group* agree;
  const char* name;  // "mm_forward", "mm_dgrad" or "mm_wgrad"

  // Returns a @ b, computed in the way that a warm-up found to be fastest among those with right
  // results, or in torch's way if there was no warm-up. Two kinds of products are never measured:
  // empty ones and, on the CPU, those too small for a copy to pay.
  at::Tensor mm(const at::Tensor& a, const at::Tensor& b,
                const std::optional<at::Tensor>& bias = std::nullopt) const;
};

// Settles the choice for a product of this rank only. Returns the name under which the choice is
// kept and listed, or an empty name for a product that ProductChoice never measures.
std::string tune_product(const at::Tensor& a, const at::Tensor& b,
                         const std::optional<at::Tensor>& bias, const std::string& name);

}  // namespace axonn::ops
